"""How large do hot buffers have to be? Records the selections of a run, and replays them for any H.

Without a file, replay takes the trace that comes with the package: 3 layers of Gemma 3 270M reading a play.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from hisparse import demo
from hisparse.arrays import NumpyArrays
from hisparse.bench.report import counted, table
from hisparse.presets import PRESETS, ItemFormat, item_format

from . import file, recorder, report
from .replay import Link, replay

SUMMARY = "choose the size of hot buffers by recorded selections"

_SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # times the tokens of a selection
_LARGEST = 32768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    defaults = demo.Settings()
    record = commands.add_parser("record", help="record the selections of the demo's attention over a text")
    record.add_argument("out", type=Path, help="file to write (.npz)")
    record.add_argument("--text", type=Path, metavar="FILE", help="a text, UTF-8; without it, the play of the demo")
    record.add_argument("--steps", type=_integer(1), default=defaults.steps, help="words to decode (%(default)s)")
    record.add_argument("--top-k", type=_integer(1, 16383), default=defaults.top_k, help="K (%(default)s)")
    record.add_argument("--seed", type=_integer(0), default=defaults.seed, help="of the projection (%(default)s)")

    again = commands.add_parser("replay", help="hits, misses and time for each H")
    again.add_argument("file", type=Path, nargs="?", help="a trace (.npz), or int32 [steps, (layers,) rows, K] (.npy)")
    again.add_argument("--hot-buffers", type=_integers, metavar="H,H,...", help="sizes to try (1 to 32 times K)")
    again.add_argument("--prompt", type=_integer(1), metavar="N", help="for .npy: tokens of each prompt, if known")
    again.add_argument("--skip-steps", type=_integer(0), default=0, metavar="N", help="first steps to leave out (0)")
    again.add_argument(
        "--times", type=_integer(1), default=1, metavar="N", help="a batch with N requests like each of the trace (1)"
    )
    again.add_argument(
        "--item",
        type=_item,
        default=PRESETS["deepseek-v3.2-fp8"],
        metavar="BYTES|NAME",
        help=f"bytes of a token in a layer, or of {', '.join(PRESETS)} (deepseek-v3.2-fp8)",
    )
    again.add_argument(
        "--link-gb-per-s",
        type=_rate,
        default=44.0,
        metavar="RATE",
        help='rate of the copies, or "measure" for this machine\'s GPU (44: an H200 with 656 B)',
    )
    again.add_argument(
        "--overhead-us", type=float, default=7.2, metavar="US", help="of a swap-in with few misses (7.2: an H200)"
    )
    again.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (.png, .svg); needs matplotlib")
    again.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE, misses of each step too")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        return _record(args) if args.action == "record" else _replay(args)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))


def _record(args: argparse.Namespace) -> int:
    text = args.text.read_text(encoding="utf-8") if args.text else None
    settings = demo.Settings(args.steps, args.top_k, max(args.top_k, demo.Settings().hot_buffer), args.seed)
    source = f"hisparse demo, {args.text.name if args.text else 'As You Like It'}"
    with recorder.recording(args.out, source):
        result = demo.decode(settings, NumpyArrays(), text)
    trace = file.load(args.out)
    steps, _, rows, width = trace.top_k.shape
    requests = f"{counted(rows, 'request')} of up to {trace.longest} words"
    print(f"{args.out}: {counted(steps, 'step')}, {requests}, {width} of them selected")
    return 0 if result.passed else 1


def _replay(args: argparse.Namespace) -> int:
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "hisparse[plot]"')
    trace = file.load(args.file, args.prompt) if args.file else file.shipped()
    steps, layers, rows, width = trace.top_k.shape
    if 0 in trace.top_k.shape:
        raise ValueError(f"{trace.source or args.file}: the trace is empty, {list(trace.top_k.shape)}")
    if args.skip_steps >= steps:
        raise ValueError(f"argument --skip-steps: the trace has {steps} steps, got {args.skip_steps}")
    sizes = args.hot_buffers or _sizes(trace)
    rate = measured_rate(args.item.item_size_bytes) if args.link_gb_per_s is None else args.link_gb_per_s * 1e9
    link = Link(rate, args.overhead_us / 1e6)
    replays = [result.without_first(args.skip_steps).times(args.times) for result in replay(trace, sizes)]
    numbers = report.rows(replays, args.item.token_bytes, link)

    counts = {"step": steps, "layer": layers, "row": rows}
    shape = ", ".join(counted(count, noun) for noun, count in counts.items())
    print(f"{trace.source}: {shape}, {width} entries, up to {trace.longest} tokens")
    print(f"{counted(args.times * rows, 'request')}, items of {args.item.token_bytes} B, ", end="")
    print(f"{rate / 1e9:.1f} GB/s, {args.overhead_us:g} us a swap-in\n")
    print(table(numbers, report.COLUMNS))
    print("\nPer step, all layers and rows together. H = 0: no hot buffer, every read is copied.")
    if args.plot:
        report.plot(args.plot, replays, numbers, trace.source)
    if args.json:
        steps = {result.hot_buffer_size: result.misses.sum(axis=1).tolist() for result in replays}
        content = {"source": trace.source, "link_gb_per_s": rate / 1e9, "rows": numbers, "misses_per_step": steps}
        args.json.write_text(json.dumps(content) + "\n")
    return 0


def _sizes(trace: file.Trace) -> list[int]:
    """Up to the first that holds everything."""
    sizes = [int(factor * trace.selected_tokens) for factor in _SIZES]
    fitting = [size for size in sizes if size < trace.longest and size <= _LARGEST]
    return fitting or sizes[:1]


def measured_rate(item_size_bytes: int) -> float:
    """Bytes per second at which this machine's GPU gathers items out of pinned host memory."""
    try:
        import torch
    except ImportError as error:
        raise RuntimeError("measuring the link needs torch, which is not installed") from error
    if not torch.cuda.is_available():
        raise RuntimeError("measuring the link needs a GPU, and torch finds none")
    import hisparse
    from hisparse.bench.timing import time_together

    count, calls = 65536, 4
    host = torch.zeros(calls * count, item_size_bytes, dtype=torch.uint8).pin_memory()
    device = torch.empty(count, item_size_bytes, dtype=torch.uint8, device="cuda")
    sources = torch.randperm(calls * count, device="cuda").view(calls, count)
    targets = torch.arange(count, device="cuda")

    def gather(call: int) -> None:
        hisparse.copy_items(host, device, sources[call], targets, item_size_bytes)

    time = time_together({"gather": gather}, calls)["gather"]
    return count * item_size_bytes / (time.median / 1e6)


def _integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low}..{high}, got {value}")
        return value

    parse.__name__ = "integer"
    return parse


def _integers(text: str) -> list[int]:
    return [_integer(1, _LARGEST)(part) for part in text.split(",")]


def _item(text: str) -> ItemFormat:
    return item_format(int(text) if text.isdigit() else text)


def _rate(text: str) -> float | None:
    """None: to be measured."""
    if text == "measure":
        return None
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)

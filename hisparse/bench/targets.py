"""What the measured rows say about each sentence of the project's speed targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .report import counted

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One sentence, with the row that is furthest from it; not met where any row misses the bound."""

    sentence: str
    rows: int  # that the sentence is about; 0: none was measured
    missed: int
    worst: str
    aim: str = ""

    def __str__(self) -> str:
        if self.rows == 0:
            return f"not measured  {self.sentence}"
        rows = counted(self.rows, "row")
        how = f"{self.missed} of {rows} {'misses' if self.missed == 1 else 'miss'} it" if self.missed else rows
        word = "NOT MET" if self.missed else "met"
        return f"{word:<13} {self.sentence}: worst {self.worst}; {how}{self.aim}"


def _verdict(
    sentence: str,
    rows: Iterable[Row],
    value: Callable[[Row], float],
    most: float,
    name: Callable[[Row], str],
    aim: float | None = None,
    text: Callable[[float], str] = "{:.1f} us".format,
) -> Verdict:
    """Of rows whose value is to be at most ``most``. Shares come negated."""
    rows = list(rows)
    if not rows:
        return Verdict(sentence, 0, 0, "")
    worst = max(rows, key=value)
    reached = "" if aim is None else ("; aim reached" if value(worst) <= aim else f"; aim {text(aim)} not reached")
    missed = sum(value(row) > most for row in rows)
    return Verdict(sentence, len(rows), missed, f"{text(value(worst))} at {name(worst)}", reached)


def _share(value: float) -> str:
    return f"{-value:.1%}"


def _slower(other: str, other_spread: str) -> Callable[[Row], float]:
    """Microseconds by which ours is slower, less what the two spreads explain."""
    return lambda row: row["us"] - row[other] - row["spread"] - (row[other_spread] or 0.0)


def _swap_in_name(row: Row) -> str:
    keys = {"hot_buffer_size": "H", "batch": "B", "item_size_bytes": "item", "miss_rate": "miss"}
    named = " ".join(f"{title}={row[key]}" for key, title in keys.items())
    return f"{named} {row['state']}/{row['host_order']}"


def swap_in_verdicts(rows: list[Row]) -> list[Verdict]:
    """Floors and shares of the shuffled state with a random host order and of the other states apart."""
    shuffled = [row for row in rows if (row["state"], row["host_order"]) == ("shuffled", "random")]
    others = [row for row in rows if row not in shuffled]
    verdicts = []

    def add(sentence: str, value: Callable[[Row], float], most: float, aim: float, text: Any, **of: Any) -> None:
        def wanted(row: Row) -> bool:
            return all(row[key] in allowed for key, allowed in of.items())

        for part, label in ((shuffled, "shuffled state"), (others, "other states")):
            found = filter(wanted, part)
            verdicts.append(_verdict(f"{sentence}, {label}", found, value, most, _swap_in_name, aim, text))

    def over(row: Row) -> float:
        return row["over_floor_us"]

    def us(row: Row) -> float:
        return row["us"]

    def share(row: Row) -> float:
        return -row["share_of_ceiling"]

    microseconds = "{:.1f} us".format
    missing, small = {0.2, 0.05, 0.001}, {1, 4, 10, 24}
    for hot, most, aim in ((4096, 5.0, 4.0), (8192, 7.5, 5.5)):
        sentence = f"H={hot}, B <= 24: at most floor + {most} us"
        add(sentence, over, most, aim, microseconds, hot_buffer_size={hot}, batch=small, miss_rate=missing)
    for hot in (4096, 8192):
        of = {"hot_buffer_size": {hot}, "batch": {100}, "miss_rate": {0.2}, "item_size_bytes": {512, 576, 1024, 1152}}
        add(f"H={hot}, B=100, 20 % misses: at least 97 % of the gather ceiling", share, -0.97, -0.99, _share, **of)
    for hot, most, aim in ((4096, 9.0, 8.0), (8192, 11.0, 9.0)):
        of = {"hot_buffer_size": {hot}, "batch": {100}, "miss_rate": {0.001}}
        sentence = f"H={hot}, B=100, 0.1 % misses: at most {most} us"
        add(f"{sentence}, 512 B", us, most, aim, microseconds, **of, item_size_bytes={512})
        add(f"{sentence}, all sizes", us, most, aim, microseconds, **of)
    of = {"hot_buffer_size": {4096}, "batch": {1}, "miss_rate": {0.0}}
    add("H=4096, B=1, all hits: at most 6 us", us, 6.0, 5.0, microseconds, **of)
    slower = "{:+.2f} us beyond the spreads".format
    one_block = _slower("one_block_us", "one_block_spread")
    verdicts.append(
        _verdict("never slower than one block per request", rows, one_block, 0.0, _swap_in_name, None, slower)
    )
    with_peer = [row for row in rows if row["peer_us"] is not None]
    peer = _slower("peer_us", "peer_spread")
    verdicts.append(_verdict("never slower than the peer", with_peer, peer, 0.0, _swap_in_name, None, slower))
    return verdicts


def _transfer_name(row: Row) -> str:
    return f"{row['op']} {row['direction']} {row['items']} x {row['item_size_bytes']} B quota={row['block_quota']}"


def kvcacheio_verdicts(rows: list[Row]) -> list[Verdict]:
    verdicts = []

    def of(**wanted: Any) -> list[Row]:
        return [row for row in rows if all(row[key] in allowed for key, allowed in wanted.items())]

    def rate(row: Row) -> float:
        return -row["gb_per_s"]

    def rate_text(value: float) -> str:
        return f"{-value:.1f} GB/s"

    def add(sentence: str, chosen: list[Row], value: Callable[[Row], float], most: float, text: Any) -> None:
        verdicts.append(_verdict(sentence, chosen, value, most, _transfer_name, None, text))

    many: dict[str, Any] = {"op": {"per layer"}, "items": {65536}}
    chosen = of(**many, direction={"h2d"}, block_quota={2}, item_size_bytes={512, 1152, 4096})
    add("host to device at quota 2: at least 40 GB/s", chosen, rate, -40.0, rate_text)
    chosen = [row for row in of(**many, direction={"h2d"}) if row["block_quota"] >= 4]
    add(
        "host to device from quota 4: at least 98 % of the ceiling",
        chosen,
        lambda row: -row["share_of_ceiling"],
        -0.98,
        _share,
    )
    chosen = [row for row in of(**many, direction={"d2h"}, block_quota={2}) if row["item_size_bytes"] >= 512]
    add("device to host at quota 2: at least 48 GB/s", chosen, rate, -48.0, rate_text)
    slower = "{:+.2f} us beyond the spreads".format
    few = [row for row in of(items={256}) if row["peer_us"] is not None]
    add("256 items: no slower than the peer", few, _slower("peer_us", "peer_spread"), 0.0, slower)
    most = [row for row in of(items={65536}) if row["peer_us"] is not None]
    add("65,536 items: no slower than the peer", most, _slower("peer_us", "peer_spread"), 0.0, slower)

    key = ("direction", "items", "item_size_bytes", "block_quota")
    per_layer = {tuple(row[k] for k in key): row["gb_per_s"] for row in of(**many)}
    for op in ("all layers", "page first"):
        chosen = [row for row in of(op={op}, items={65536}) if tuple(row[k] for k in key) in per_layer]

        def ratio(row: Row) -> float:
            return -row["gb_per_s"] / per_layer[tuple(row[k] for k in key)]

        add(f"{op}: within 5 % of the per-layer rate", chosen, ratio, -0.95, _share)
    return verdicts


def text_of(verdicts: list[Verdict]) -> str:
    """A line for each sentence, the empty string for none. They are about one H200."""
    if not verdicts:
        return ""
    return "\n".join(["Targets (of one H200)", *(f"- {verdict}" for verdict in verdicts)])

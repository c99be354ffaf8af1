"""The end of the interpreter while daemon threads are in calls, and calls that come late."""

from __future__ import annotations

import pytest
from test_processes import run

FAULTS = """
    def call_with_faults():
        # The text of a dtype is made by Python code, and so is a ContentError.
        for wrong in (index.astype(np.float16), np.full(4, 4)):
            try:
                with hisparse.checking():
                    hisparse.copy_items(src, np.zeros((4, 16), np.uint8), wrong, index, 16)
            except (TypeError, hisparse.ContentError):
                continue
            raise AssertionError
"""
NUMBER = """
    import numbers
    def call_with_number(answer):
        # Of a type that no call has met yet, and that answers in Python code.
        cls = type("Number", (), {"__index__": lambda self: answer()})
        numbers.Integral.register(cls)
        dst = np.zeros((4, 16), np.uint8)
        hisparse.copy_items(src, dst, index, np.arange(4), cls())
        assert (dst == src[index]).all()
"""
DISPATCHED = """
    import torch
    import hisparse.torch_ops
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        def __init__(self, inner):
            self.inner = inner
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return function(*[arg.inner if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))
    tensors = [torch.from_numpy(src), torch.zeros(4, 16, dtype=torch.uint8)]
    wrapped = [Wrapped(tensor) for tensor in tensors]
    indices = [torch.from_numpy(index), torch.arange(4)]
    def call_dispatched():  # and nothing of torch itself, which could abort at the end
        hisparse.copy_items(*wrapped, *indices, 16)
"""


def ends_cleanly(script: str, printed: str = "end\n", before: str = "") -> None:
    result = run(script, before)
    assert (result.returncode, result.stdout, result.stderr) == (0, printed, "")


def in_daemon_threads(work: str, after: str = "") -> str:
    return f"""
    def work():
        while True:
            {work}
    for _ in range(6):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
    print("end", flush=True)
    {after}
"""


@pytest.mark.parametrize("work", ["call()", "call_with_faults()"])
@pytest.mark.parametrize("after", ["", "sys.exit(0)", "import atexit; atexit.register(call)"])
def test_daemon_threads_in_calls(work, after):
    """Without the wait at the end, the interpreter stops such a thread in a destructor, and the process aborts."""
    ends_cleanly(FAULTS + in_daemon_threads(work, after))


def test_daemon_threads_in_calls_that_torch_dispatches():
    pytest.importorskip("torch")
    ends_cleanly(DISPATCHED + in_daemon_threads("call_dispatched()"))


IN_A_CALL = {
    "the value of a number": "call_with_number(lambda: later() or 16)",
    "the type of a number": "hisparse.copy_items(src, src.copy(), index, index, Asked())",
    "an error": "call_with_fault()",
    "a dispatched call": "call_dispatched()",
    "an allocation": "hisparse.translate_padded_hisparse_locations(index.view(Array), index.view(Array))",
}


@pytest.mark.parametrize("code", IN_A_CALL)
def test_the_end_waits_for_python_code_in_a_call(code):
    """A thread that is in it gets the GIL back, and goes on."""
    dispatched = ""
    if "dispatched" in code:
        pytest.importorskip("torch")
        dispatched = DISPATCHED.replace("return function(", "later(); return function(")
    ends_cleanly(
        NUMBER
        + dispatched
        + f"""
    import hisparse.content_check
    inside = threading.Event()
    def later():
        inside.set()
        time.sleep(1)
        os.write(1, b"later" + bytes([10]))
    class Meta(type):
        def __subclasscheck__(cls, other):
            if other is Asked:
                later()
            return other is Asked
    class Asks(metaclass=Meta):
        pass
    class Asked:
        def __index__(self):
            return 16
    numbers.Integral.register(Asks)
    class LateError(hisparse.ContentError):
        def __init__(self, *arguments):
            later()
            super().__init__(*arguments)
    hisparse.content_check.ContentError = LateError
    def call_with_fault():
        try:
            with hisparse.checking():
                hisparse.copy_items(src, src.copy(), np.full(4, 4), index, 16)
        except hisparse.ContentError:
            pass
    class Array(np.ndarray):
        def new_empty(self, shape, dtype):
            later()
            return np.empty(shape, dtype)
    def work():
        {IN_A_CALL[code]}
    threading.Thread(target=work, daemon=True).start()
    assert inside.wait(20)
    print("end", flush=True)
    """,
        "end\nlater\n",
    )


def test_a_call_inside_a_call_goes_on_while_the_end_waits():
    ends_cleanly(
        NUMBER
        + """
    import atexit
    inside, begun = threading.Event(), threading.Event()
    def calls():
        inside.set()
        begun.wait(20)
        time.sleep(0.5)  # the end waits by now
        call()
        os.write(1, b"inside" + bytes([10]))
        return 16
    threading.Thread(target=call_with_number, args=(calls,), daemon=True).start()
    inside.wait(20)
    atexit.register(begun.set)
    print("end", flush=True)
    """,
        "end\ninside\n",
    )


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_op_in_daemon_threads(library):
    """Sizes are NumPy's integers and tensors have floats: Python code and torch are asked about them."""
    if library == "torch":
        pytest.importorskip("torch")
    ends_cleanly(f"""
        library = "{library}"
        if library == "torch":
            import torch
        from right_calls import RIGHT_CALLS, public_ops

        def given(value):
            if isinstance(value, list) and isinstance(value[0], np.ndarray):
                return [given(item) for item in value]
            if type(value) is int:
                return np.int64(value)
            if library == "numpy" or not isinstance(value, np.ndarray):
                return value
            tensor = torch.from_numpy(value)
            is_pool = tensor.dtype is torch.uint8 and tensor.ndim > 1 and tensor.shape[-1] % 2 == 0
            return tensor.view(torch.float16) if is_pool else tensor

        def work(name, op, arguments):
            op(**arguments)
            running.add(name)
            while True:
                op(**arguments)

        running, calls = set(), []
        sys.setswitchinterval(1e-5)
        for name, op in public_ops().items():
            calls.append(RIGHT_CALLS[name]())  # kept: tables of addresses do not hold what they name
            arguments = {{key: given(value) for key, value in calls[-1].items()}}
            for _ in range(2):
                threading.Thread(target=work, args=(name, op, arguments), daemon=True).start()
        deadline = time.monotonic() + 100
        while running != set(public_ops()):
            assert time.monotonic() < deadline, set(public_ops()) - running
            time.sleep(0.01)
        print("end", flush=True)
    """)


def test_a_handler_that_came_first_waits_for_threads_that_call():
    """It runs after all that hisparse and torch have registered, and its threads still do all their work."""
    ends_cleanly(
        """
        from right_calls import RIGHT_CALLS, public_ops
        """,
        "4\n",
        before="""
        import atexit
        def last():
            results = []
            def work():
                for name, op in public_ops().items():
                    arguments = RIGHT_CALLS[name]()
                    op(**arguments)
                results.append(True)
            threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            print(len(results), flush=True)
        atexit.register(last)
        """,
    )


def test_operators_of_torch_stay_to_the_last_handler():
    """torch would take them away before, while threads are in calls of them, and a process crashed there."""
    pytest.importorskip("torch")
    last = """
    import atexit
    def last():
        thread = threading.Thread(target=call_dispatched)
        thread.start()
        thread.join()
        call_dispatched()
        assert (tensors[1] == tensors[0][indices[0]]).all()
        print("end", flush=True)
    atexit.register(last)
"""
    ends_cleanly(DISPATCHED + "    call_dispatched()", before=last)


@pytest.mark.parametrize("function", ["_run_exitfuncs", "_clear"])
def test_handlers_that_python_code_calls_or_clears_are_no_end(function):
    """As a process that multiprocessing forked does."""
    ends_cleanly(f"""
        import atexit
        atexit.{function}()
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        print("still in the call" if thread.is_alive() else "end", flush=True)
    """)


def test_calls_in_finalizers():
    ends_cleanly(
        """
        class Late:
            def __del__(self, copy_items=hisparse.copy_items, src=src, dst=np.zeros((4, 16), np.uint8), index=index):
                copy_items(src, dst, index, index, 16)
                assert (dst == src).all()
                print("late", flush=True)
        call()
        keep = Late()
        """,
        "late\n",
    )


# Forks


def test_a_fork_of_a_process_in_calls():
    """The child has none of the calls that it would have to wait for."""
    ends_cleanly("""
        def work():
            while True:
                call()
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        start = time.monotonic()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                call()
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert time.monotonic() - start < 25, time.monotonic() - start
        print("end", flush=True)
    """)


IN_A_CHILD = """
    def begin():
        # The child's own daemon thread is in a call at its end, which has to wait.
        inside = threading.Event()
        def later():
            inside.set()
            time.sleep(1)
            os.write(1, b"later" + bytes([10]))
            return 16
        threading.Thread(target=call_with_number, args=(later,), daemon=True).start()
        assert inside.wait(20)
    def outcome(child):
        print("end", os.waitpid(child, 0)[1], flush=True)
"""


def test_a_fork_in_a_call():
    """The child is in that call as well, and leaves it: its count of calls is right again."""
    ends_cleanly(
        NUMBER
        + IN_A_CHILD
        + """
    def forks():
        global child
        child = os.fork()
        return 16
    call_with_number(forks)
    if child == 0:
        begin()
        sys.exit(0)
    outcome(child)
    """,
        "later\nend 0\n",
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_fork_in_a_handler(order):
    """The child returns from the handler, and its end is one of its own."""
    handler = """
    import atexit, os
    def handler():
        child = os.fork()
        if child == 0:
            begin()
        else:
            outcome(child)
    atexit.register(handler)
"""
    script = NUMBER + IN_A_CHILD + ("" if order == "before" else handler)
    ends_cleanly(script, "later\nend 0\n", before=handler if order == "before" else "")


def test_a_fork_while_the_end_waits():
    """The thread that ends is not in the child, so the child's calls are no late ones."""
    ends_cleanly(
        NUMBER
        + """
    import atexit, signal
    inside, begun, done = (threading.Event() for _ in range(3))
    def holds_up_the_end():
        inside.set()
        done.wait(20)
        return 16
    def forks():
        begun.wait(20)
        time.sleep(0.5)  # the end waits by now
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            call()
            os._exit(0)
        print("end", os.waitpid(child, 0)[1], flush=True)
        done.set()
    threading.Thread(target=call_with_number, args=(holds_up_the_end,), daemon=True).start()
    threading.Thread(target=forks, daemon=True).start()
    atexit.register(begun.set)
    inside.wait(20)
    """,
        "end 0\n",
    )

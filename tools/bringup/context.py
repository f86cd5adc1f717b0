"""What a rung gets: where it runs, how it launches, and how it compares."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mok.errors import MokError

if TYPE_CHECKING:
    from torch import Tensor

    from mok.backends import Backend
    from mok.runtime.compile import Kernel
    from mok.tools.bringup.notes import Notes

SHOWN = 8  # wrong elements that a report lists
COUNTERS_EVERY_S = 2.0  # while a kernel runs
FAULTS = ("wrong", "error", "hang", "crash")
"""What ``inject`` can do to a rung: damage its first result, raise, never end, die."""


class WrongError(MokError):
    """A rung's result is not what it must be."""

    REMEDY = "Send the report; docs/blackwell-first-hour.md says where to look meanwhile."


class NotHere(Exception):
    """The machine or this version lacks what the rung tries, and need not have it; says what."""


@dataclass
class Context:
    """One rung's surroundings.

    Attributes:
        backend: a GPU's kernels, or the emulator.
        notes: where everything is written down.
        fault: one of ``FAULTS``, or "" for none.
        seed: of inputs and, in the emulator, of the adversarial machine.
        counters: reads the counters of what runs, even while it hangs.
        rewrite: applied to the PTX of a rung's own kernels in the emulator, to damage them.
    """

    backend: Backend
    notes: Notes
    fault: str = ""
    seed: int = 0
    counters: Callable[[], Any] | None = None
    rewrite: Callable[[str], str] | None = None
    _launched: str = field(default="", repr=False)

    @property
    def arch(self) -> str:
        assert self.backend.arch is not None
        return self.backend.arch

    @property
    def on_gpu(self) -> bool:
        return self.backend.on_gpu

    @property
    def blackwell(self) -> bool:
        return self.arch != "sm_90a"

    # ------------------------------------------------------------ running

    @contextlib.contextmanager
    def machine(self, num_sms: int = 2, preempt: Any = None) -> Iterator[Any]:
        """The adversarial emulator around a rung's own kernels; on a GPU, nothing (None)."""
        if self.on_gpu:
            yield None
            return
        from mok.tools.emulator import Emulator

        with Emulator(
            self.arch, num_sms, seed=self.seed, preempt=preempt, rewrite=self.rewrite
        ) as emulator:
            yield emulator

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes every launch inside, after the one before it has ended."""
        from mok.runtime.launch import set_launch_watcher

        before = set_launch_watcher(self._before_launch)
        try:
            yield
            self.wait()
        finally:
            set_launch_watcher(before)

    def _before_launch(self, kernel: Kernel) -> None:
        self.wait()
        self.notes.kernel(kernel)
        self.notes.write("launch", name=kernel.spec.name)
        self._launched = kernel.spec.name

    def wait(self) -> None:
        """Until the GPU is idle, noting counters meanwhile: a hang then shows who waits for what."""
        if not self.on_gpu or not self._launched:
            return
        import torch

        stream = torch.cuda.current_stream(self.backend.device)
        begin = noted = time.monotonic()
        while not stream.query():
            now = time.monotonic()
            time.sleep(5e-5 if now - begin < 0.05 else 5e-3)
            if now - noted > COUNTERS_EVERY_S:
                noted = now
                self.note_counters(f"{self._launched} runs for {now - begin:.0f} s")
        self._launched = ""

    def note_counters(self, when: str) -> None:
        """Write down the counters, if there are any and they can be read."""
        if self.counters is None:
            return
        try:
            self.notes.write("counters", when=when, counters=self.counters())
        except (MokError, RuntimeError, OSError) as error:
            self.notes.write("counters", when=when, error=str(error)[:500])

    @property
    def stream(self) -> int:
        """torch's current stream, as kernels take it."""
        from mok.arguments import stream_handle

        return stream_handle(self.backend.device)

    def put(self, emulator: Any, *tensors: Tensor) -> Any:
        """Tensors where kernels reach them: on the GPU, or registered with the emulator."""
        if self.on_gpu:
            moved = tuple(t.to(self.backend.device) for t in tensors)
        else:
            emulator.register(*tensors)
            moved = tensors
        return moved if len(moved) > 1 else moved[0]

    # ---------------------------------------------------------- comparing

    def compare(
        self, name: str, found: Tensor, expected: Tensor, limit: float | None = None
    ) -> str:
        """Compare element by element, or with ``limit`` by relative L2; says how it went.

        Raises:
            WrongError: it does not hold. The first wrong elements are in the notes.
        """
        from mok.reference import relative_l2

        found, expected = found.detach().cpu(), expected.detach().cpu()
        if self._damage():
            found = found.clone()
            found.view(-1)[found.numel() // 2] += 1 if limit is None else 1e4
        facts: dict[str, Any] = {"name": name, "sha256": sha256(found), "elements": found.numel()}
        if found.shape != expected.shape:
            raise WrongError(f"{name} must have shape {list(expected.shape)}", list(found.shape))
        if limit is None:
            expected = expected.to(found.dtype)
            wrong = (found != expected).nonzero()
            facts |= {"mismatches": len(wrong), "first": first_wrong(found, expected, wrong)}
            ok, text = not len(wrong), f"{len(wrong)} of {found.numel()} elements differ"
        else:
            error = relative_l2(found, expected)
            facts |= {"relative_l2": error, "limit": limit}
            ok, text = error <= limit, f"relative L2 error {error:.2e}, limit {limit:.1e}"
        self.notes.write("value", ok=ok, **facts)
        if not ok:
            raise WrongError(f"{name} must be what the oracle gives", text)
        return "exact" if limit is None else f"{facts['relative_l2']:.1e}"

    def expect(self, name: str, found: Any, expected: Any, remedy: str = "") -> None:
        """A plain value.

        Raises:
            WrongError: it is another.
        """
        if self._damage():
            found = f"{found} (damaged)"
        self.notes.write("value", name=name, ok=found == expected, found=str(found))
        if found != expected:
            raise WrongError(f"{name} must be {expected}", found, remedy)

    # ------------------------------------------------------------- faults

    def begin(self) -> None:
        """The start of a rung: where faults other than a wrong value strike."""
        if self.fault == "error":
            raise RuntimeError("injected: an error on purpose")
        if self.fault == "crash":
            os.abort()
        if self.fault == "hang":
            self._hang()

    def _hang(self) -> None:
        """A kernel that takes a minute (or, without a GPU, a sleep)."""
        if self.on_gpu:
            import torch

            from mok.runtime.launch import launch
            from mok.tools.bringup.single import hold_kernel

            count = torch.zeros(1, dtype=torch.int32, device=self.backend.device)
            self.counters = lambda: {"held": "no counter: this kernel only waits"}
            launch(hold_kernel(self.arch), count.data_ptr(), 1, 60_000_000, self.stream)
            self.wait()
        time.sleep(60)
        raise RuntimeError("injected: nobody ended a rung that hung for a minute")

    def _damage(self) -> bool:
        """Whether this result is to be damaged: the first one."""
        struck = self.fault == "wrong"
        if struck:
            self.fault = ""
        return struck


def sha256(tensor: Tensor) -> str:
    """Of the bytes, row-major."""
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def first_wrong(found: Tensor, expected: Tensor, wrong: Tensor) -> list[dict[str, Any]]:
    """The first wrong elements: where, what, and what it should be."""
    shown = []
    for index in wrong[:SHOWN]:
        at = tuple(index.tolist())
        pair = {"found": found[at].item(), "expected": expected[at].item()}
        shown.append({"at": list(at), **pair})
    return shown

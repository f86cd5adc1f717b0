"""The task loop without tasks: tickets, launch control and giving way, with a nap where a task would be.

The loop of ``MegaKernel.schedule_role`` on the layer's own ``Starts`` and ``LaunchControl``. One warp of the
cluster's first CTA runs it; shared memory keeps other blocks from the SM, as the layer's kernels do.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from .. import ptx
from ..queue import LaunchControl, Starts, broadcast, draw
from ..sync import int_ptr

HELD_BYTES = 200 * 1024
COUNTERS = ("ticket", "started", "granted", "refused", "left", "done")  # places of ``counters``


class LoopKernel:
    """Count every one of ``tasks`` tasks once, whatever the grid and whoever else wants the SMs.

    Config:
        scheduling: "clc" (clusters of two, Blackwell) or "tickets" (single CTAs).
    """

    def __init__(self, scheduling: str):
        self.use_clc = scheduling == "clc"
        self.ctas = 2 if self.use_clc else 1

    @cute.jit
    def __call__(
        self,
        counters: Int64,  # int32 [16], zeroed: see COUNTERS
        done: Int64,  # int32 [tasks], zeroed: how often each task was done
        tasks: Int32,
        clusters: Int32,
        naps: Int32,
        stream: cuda.CUstream,
    ):
        """A task takes about ``naps`` microseconds."""

        @cute.struct
        class Storage:
            arrived: cute.struct.MemRange[Int64, 1]
            reply: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            held: cute.struct.MemRange[Int32, HELD_BYTES // 4]

        self.storage = Storage
        self.kernel(counters, done, tasks, naps).launch(
            grid=(clusters * self.ctas, 1, 1),
            block=(32, 1, 1),
            cluster=(self.ctas, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, counters: Int64, done: Int64, tasks: Int32, naps: Int32):
        storage = SmemAllocator().allocate(self.storage)
        starts = Starts(
            int_ptr(counters) + COUNTERS.index("started"), cute.arch.grid_dim()[0] // self.ctas
        )
        control = LaunchControl(storage.reply.data_ptr(), storage.arrived.data_ptr())
        if cute.arch.lane_idx() == 0:
            control.init()
            if cute.arch.block_idx()[0] % self.ctas == 0:
                starts.add()
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if cute.arch.block_idx()[0] % self.ctas == 0:
            self.work(counters, int_ptr(done), control, starts, tasks, naps)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def work(self, counters: Int64, done, control, starts, tasks: Int32, naps: Int32):
        """Draw while there is a right to, ask for one more beside each task, answer what was asked."""
        tickets = int_ptr(counters)
        right, phase = Int32(1), Int32(0)
        asking = Int32(1 if self.use_clc else 0)
        more = Int32(1)
        while more != 0:
            ticket = tasks
            if right != 0:
                ticket = broadcast(draw(tickets))
            if ticket < tasks:
                if asking != 0:
                    control.ask()
                for _ in cutlass.range(naps, unroll=1):
                    ptx.nanosleep(1000)
                if cute.arch.lane_idx() == 0:
                    cute.arch.atomic_add(done + ticket, Int32(1), sem="relaxed", scope="gpu")
                    self.note(counters, "done")
                if asking != 0:
                    asking = self.granted(counters, control, starts, phase)
                    phase = phase ^ 1
                    right = asking
                    if asking == 0:
                        right = starts.all_started()
                        if right == 0:
                            if cute.arch.lane_idx() == 0:
                                self.note(counters, "left")
            else:
                more = Int32(0)
        while asking != 0:
            control.ask()
            asking = self.granted(counters, control, starts, phase)
            phase = phase ^ 1

    @cute.jit
    def granted(self, counters: Int64, control, starts, phase: Int32):
        """The answer to a query, counted."""
        grant = control.answer(phase)
        if cute.arch.lane_idx() == 0:
            if grant != 0:
                starts.add()
                self.note(counters, "granted")
            else:
                self.note(counters, "refused")
        return grant

    def note(self, counters: Int64, name: str) -> None:
        """Add one to a counter."""
        place = int_ptr(counters) + COUNTERS.index(name)
        cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="gpu")

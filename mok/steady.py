"""A forward call like an earlier one: the same kinds of arguments at other addresses.

What its launches take from shapes and config is then packed already, its arguments need no check but that
they are of the kind that was checked, and its counters were zeroed by the call before. One local rank in BF16,
whose arguments are tensors or, as ``MoELayer``'s, lists of one; everything else is a ``mok.call.Call``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.arguments import limit_of, stream_of
from mok.call import FORWARD_LEADING, MOST_KINDS, SUM_LEADING, Call, facts_of, new_tensor, num_sms
from mok.config import Config
from mok.runtime.launch import Prepared
from mok.saved import ForwardContext, Schedule

if TYPE_CHECKING:
    from mok.runtime.workspace import Workspace


class Arguments:
    """Those of ``functional.forward``, and what they are the key to."""

    __slots__ = ("addresses", "facts", "given", "listed", "stream")

    def __init__(
        self, schedule: Schedule, given: tuple[Any, ...], limit: float | None, save: bool
    ) -> None:
        """``given``: x, router weights, three routed and three shared weights, shared_scale."""
        self.listed = not isinstance(given[0], Tensor)  # and the output with it
        if self.listed:
            given = tuple(v[0] if isinstance(v, list) and len(v) == 1 else v for v in given)
        self.given = given
        gated = given[8] is not None
        shared = given[5] is not None or given[6] is not None or given[7] is not None
        tensors = given[: 8 if shared else 5] + (given[8:] if gated else ())
        kind = (save, shared, gated, None if limit is None else limit_of(limit))
        self.facts, self.addresses = facts_of(kind, schedule, tensors)
        self.stream = 0  # ``find`` looks it up: what is no call of a known kind is checked first


def find(workspace: Workspace, config: Config, arguments: Arguments) -> Steady | None:
    """What can serve this call; None: a ``Call`` must."""
    if arguments.facts is None:
        return None
    known = getattr(workspace, "steady", None)  # what is no workspace is refused by ``Call``
    found: Steady | None = None if known is None else known.get(arguments.facts)
    if found is None or found.sms != num_sms(workspace):
        return None
    if found.config is not config and found.config != config:
        return None
    arguments.stream = stream_of(workspace)
    # A graph's replays do not take turns with the counters. Torch cannot capture the default stream.
    if arguments.stream and torch.cuda.is_current_stream_capturing():
        return None
    return found


def keep(call: Call, arguments: Arguments, save: bool) -> None:
    """Serve calls like this one, which has succeeded, unless it is the first: one would not repay the packing."""
    known = call.workspace.steady
    plain = call.count == 1 and not call.mxfp8 and not call.config.trace
    if arguments.facts is None or not plain or not all(arguments.addresses):
        return
    if arguments.facts in known:
        known[arguments.facts] = Steady(call, save)
        return
    if len(known) >= MOST_KINDS:
        known.clear()
    known[arguments.facts] = None


class Steady:
    """The launches of one kind of call.

    Args:
        call: one of this kind; its tensors are not kept.
        save: contexts are saved.
    """

    def __init__(self, call: Call, save: bool) -> None:
        w = call.workspace
        self.config, self.sms = call.config, num_sms(w)
        self.direct, self.save, self.absent = call.direct, save, call.absent
        self.ring, self.tokens = call.ring, call.tokens(0)
        shape = call.shape
        self.hidden, self.inner = shape.hidden_size, shape.intermediate_size
        self.shared_inner = shape.shared_intermediate_size
        self.gated = call.shared_scale is not None
        plan = call._planned((0, save, False), call._plan_forward)
        self.facts, self.buffers = plan.facts, plan.buffers
        self.x_ring = call._address(w.x_ring)
        self.rank = call.local_ranks[0]
        if self.direct:
            self.rows = w.y.data_ptr()
        else:
            assert w.slots is not None and w.x is not None
            self.rows = w.slots.address(self.rank)
        ordinal = w.device.index or 0
        turns = w.turns
        self.kernels = [
            Prepared(
                plan.kernel,
                FORWARD_LEADING,
                call.constants(0, plan, counters, w.x_scales),
                ordinal,
            )
            for counters in turns.sets
        ]
        shared_y = call.x[0] if self.shared_inner else None  # whether there is one is what counts
        scale = call.shared_scale[0] if call.shared_scale is not None else None
        ids = call.schedule.top_experts[0].dtype
        total = call.sum_plan(
            0, call.weights[0], shared_y, scale, torch.int32 if self.direct else ids
        )
        # The sum of a call that counts in one set zeroes the other.
        self.sums = [
            Prepared(
                total.kernel, SUM_LEADING, call.sum_constants(total, other, turns.size), ordinal
            )
            for other in reversed(turns.sets)
        ]

    def __call__(
        self, workspace: Workspace, schedule: Schedule, arguments: Arguments
    ) -> tuple[Tensor, ForwardContext | None]:
        """As ``functional.forward``."""
        w, stream, device = workspace, arguments.stream, workspace.device
        w.check_open()
        w.check_group()
        x, weights, *matrices = arguments.addresses
        scale = matrices.pop() if self.gated else self.absent
        ranks, absent = schedule.ranks[0], self.absent
        turn = w.turns.begin(stream)
        if not self.direct and w.x is not None:
            # A new view each time: one that is kept would be of the autograd mode that it was made in.
            staged = w.x.peer(self.rank)[: self.tokens]
            if x != staged.data_ptr():
                staged.copy_(arguments.given[0], non_blocking=True)
        w.barrier()
        out = new_tensor(device, (self.tokens, self.hidden))
        # The shared expert's result: the sum is written over it.
        shared = out.data_ptr() if self.shared_inner else absent
        if not self.shared_inner:
            matrices += absent, absent, absent
        context = None
        saved, x_ring = (absent, absent, absent, absent), self.x_ring
        if self.save:
            context = ForwardContext.of(schedule)
            x_ring, saved = self._save(context, device)
        w.last_launch = self.facts
        self.run_kernel(
            turn, stream, x, *matrices, *ranks.addresses, x_ring, *self.buffers, shared, *saved
        )
        w.barrier()
        slots = ranks.route_row if self.direct else schedule.top_experts[0]
        assert slots is not None
        self.run_sum(
            turn, stream, out.data_ptr(), self.rows, weights, shared, scale, slots.data_ptr()
        )
        w.turns.end(turn)
        w.check_call()
        return out, context

    def run_kernel(self, turn: int, stream: int, *leading: int) -> None:
        """Launch the megakernel, which counts in set ``turn``; ``leading``: its first arguments."""
        self.kernels[turn](stream, *leading)

    def run_sum(self, turn: int, stream: int, *leading: int) -> None:
        """Launch the token sum, which zeroes the other set; ``leading``: its first arguments."""
        self.sums[turn](stream, *leading)

    def _save(
        self, context: ForwardContext, device: torch.device
    ) -> tuple[int, tuple[int, int, int, int]]:
        """Memory for what is saved: the addresses of the ring and of gate and up, routed and shared."""
        gate = new_tensor(device, (self.ring, self.inner))
        up = new_tensor(device, (self.ring, self.inner))
        x_ring = None if self.direct else new_tensor(device, (self.ring, self.hidden))
        shared_gate = shared_up = None
        addresses = (gate.data_ptr(), up.data_ptr(), self.absent, self.absent)
        if self.shared_inner:
            shared_gate = new_tensor(device, (self.tokens, self.shared_inner))
            shared_up = new_tensor(device, (self.tokens, self.shared_inner))
            addresses = (*addresses[:2], shared_gate.data_ptr(), shared_up.data_ptr())
        context.x_routed.append(x_ring)
        context.gate_routed.append(gate)
        context.up_routed.append(up)
        context.gate_shared.append(shared_gate)
        context.up_shared.append(shared_up)
        return self.x_ring if x_ring is None else x_ring.data_ptr(), addresses

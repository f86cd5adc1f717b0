"""This project's layer through ``mok.functional``: direct at one rank, else through the ring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok.config import Config, Shape
from mok.errors import MokError
from mok.reference import forward_reference
from mok.runtime.plan import check_precision
from mok.tools.bench.programs.base import Options, Program, Unavailable
from mok.tools.bench.timing import reason_of
from mok.tools.bench.work import Work


def ep_size_of(name: str) -> int:
    """Virtual ranks of "mok-ep4": 4; of "mok": 1."""
    match = re.search(r"-ep(\d+)", name)
    return int(match[1]) if match else 1


def precision_of(name: str) -> str:
    """Of the routed experts: "mok-mxfp8" and "mok-mxfp8-ep4" have them in MXFP8."""
    return "mxfp8" if "mxfp8" in name else "bf16"


def layer_pushes(arch: str, direct: bool, push: bool | None = None) -> bool:
    """Whether the tasks of the layer's forward kernel, as its spec says, send their results themselves."""
    from mok import kernels
    from mok.kernels_cute.machine import forward_pushes

    chosen = dict(kernels.forward_spec(arch, direct, push=push).config).get("push")
    return forward_pushes(arch, direct, chosen)


class MokProgram(Program):
    """``build_schedule``, ``forward`` and ``backward``, schedule included in every pass that needs
    a new one. Virtual ranks split the shape's T tokens, so that each EP does the same work. MXFP8
    weights are quantised beforehand, as once per step of an optimizer."""

    packages = ("mok-cutedsl", "nvidia-cutlass-dsl", "cuda-bindings")

    def __init__(self, name: str, work: Work, options: Options) -> None:
        super().__init__(name, work, options)
        self.ep_size = ep_size_of(name)
        self.precision = precision_of(name)
        try:
            check_precision(self.precision, work.bench.shape)
        except MokError as error:
            raise Unavailable(reason_of(error)) from error
        if options.reference:
            self.passes = ("forward",)  # type: ignore[misc]
            self.note = "scheduled reference"
            return
        try:
            self._prepare(options.config)
        except MokError as error:
            raise Unavailable(reason_of(error)) from error

    def _prepare(self, config: Config | None) -> None:
        from mok import functional
        from mok.runtime.group import Group

        full, ep, device = self.work.bench.shape, self.ep_size, self.work.device
        tokens = self.work.case().tokens_per_rank(ep)
        shape = Shape(
            max(tokens), full.hidden_size, full.intermediate_size, full.num_experts, full.topk, ep
        )
        self.config = config or self._suggest(shape)
        if "compact" in self.name:
            self.config = self.config.compact(shape, self.precision)
        before = _allocated(device)
        self.workspace = functional.create_workspace(
            self.config,
            Group.virtual(ep, device) if ep > 1 else Group.single(device),
            device=device,
            max_tokens=max(shape.num_tokens, 1),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_experts=shape.num_experts,
            topk=shape.topk,
            precision=self.precision,
        )
        symmetric = ep * self.workspace.plan().bytes_of("symmetric")
        self.persistent_bytes = _allocated(device) - before + symmetric
        placement = [shape.experts_on(r) for r in range(ep)]
        self.experts = self._each([len(p) for p in placement])
        self.weights = tuple(
            self._each([self._weight(w[p.start : p.stop]) for p in placement])
            for w in (self.work.gate, self.work.up, self.work.down)
        )
        self.ids = self._each(self.work.ids.split(tokens))
        self.inputs = [
            tuple(self._each(t.split(tokens)) for t in (s.x, s.router_weights, s.dy))
            for s in self.work.sets
        ]
        c = self.config
        self.note = "MXFP8, " if self.precision == "mxfp8" else ""
        self.note += f"EP {ep}, minibatch {c.minibatch_size}, macrobatch {c.macrobatch_size}"
        if ep > 1:
            self.note += f", comm SMs {c.fwd_num_comm_sms}/{c.bwd_num_comm_sms}"
        from mok.call import launch_shape
        from mok.kernels_cute.machine import machine_of
        from mok.kernels_cute.program import MIN_AHEAD, tasks_ahead

        if launch_shape(self.workspace, c)[2]:
            self.note += ", pairs"
        if ep > 1 and self.precision == "bf16" and machine_of(self.workspace.arch).carry:
            self.note += ", carried"
        slots = c.macrobatch_size // c.minibatch_size
        if tasks_ahead(ep == 1, self.precision == "mxfp8") and slots >= MIN_AHEAD:
            self.note += ", ahead"
        if layer_pushes(self.workspace.arch, ep == 1 and self.precision == "bf16", c.push):
            self.note += ", pushed"

    def _weight(self, weight: Tensor) -> Any:
        from mok.mxfp8 import mxfp8_quantize

        return weight if self.precision == "bf16" else mxfp8_quantize(weight)

    def _suggest(self, shape: Shape) -> Config:
        """The tuned or suggested configuration of the device, or of the emulated one."""
        from mok import tune
        from mok.runtime.launch import active_emulator

        if (emulator := active_emulator()) is not None:
            return Config.suggest(shape, emulator, self.precision)
        from mok.runtime.device import device_info

        config = Config.suggest(shape, self.work.device, self.precision)
        info = device_info(self.work.device)
        if self.ep_size == 1:
            return config
        device = tune.Device(info.name, info.num_sms, str(info.arch), virtual=True)
        return tune.apply(config, shape, device)

    def _each(self, values: Sequence[Any]) -> Any:
        return values[0] if self.ep_size == 1 else list(values)

    def _schedule(self) -> Any:
        from mok import functional

        return functional.build_schedule(
            self.workspace, self.config, self.ids, num_local_experts=self.experts
        )

    def _forward(self, index: int, save_context: bool) -> tuple[Any, Any]:
        from mok import functional

        x, router_weights, _ = self.inputs[index % len(self.inputs)]
        schedule = self._schedule()
        output, context = functional.forward(
            self.config,
            self.workspace,
            schedule,
            x,
            router_weights,
            None,
            None,
            None,
            *self.weights,
            save_context=save_context,
        )
        return output, (schedule, context)

    def forward(self, index: int) -> Any:
        if self.options.reference:
            return forward_reference(self.work.case(index), self.ep_size, precision=self.precision)
        return self._forward(index, save_context=False)[0]

    def output(self, raw: Any) -> Tensor:
        return _joined(raw)

    def forward_training(self, index: int) -> tuple[Any, Any]:
        return self._forward(index, save_context=True)

    def backward(self, index: int, saved: Any, keep: bool = False) -> Any:
        from mok import functional

        x, router_weights, dy = self.inputs[index % len(self.inputs)]
        schedule, context = saved
        return functional.backward(
            self.config,
            self.workspace,
            schedule,
            context,
            dy,
            x,
            router_weights,
            None,
            None,
            None,
            *self.weights,
            keep_context=keep,
        )

    def gradients(self, raw: Any) -> dict[str, Tensor]:
        names = ("x", "router_weights", "gate", "up", "down")
        return {name: _joined(value) for name, value in zip(names, raw, strict=False)}

    def check(self) -> None:
        """Raise what kernels have noted: expired waits, bad ids."""
        if not self.options.reference:
            self.workspace.check()

    def close(self) -> None:
        if hasattr(self, "workspace"):
            self.workspace.close()


def _joined(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.cat(list(value))


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

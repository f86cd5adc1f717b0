"""MoE blocks of transformers models as MoELayer.

Supported: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3, of transformers 5 (experts stacked
in one tensor, routers that return weights and ids) and of 4 (a list of experts, a linear gate).
Nothing here imports transformers: blocks are recognised by their class names.

The layer stands in for its block: a model with replaced blocks has the state dict that it had
before, keys, shapes and values, so that checkpoints load and ``save_pretrained`` saves as ever. With
several processes, where a rank has only its own experts, the state dict is that of a plain MoELayer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mok.errors import DtypeError, MokError, ShapeError
from mok.layer import MoELayer
from mok.router import Router
from mok.scalars import index_of

BLOCKS = (
    "DeepseekV3MoE",
    "MixtralSparseMoeBlock",
    "OlmoeSparseMoeBlock",
    "Qwen2MoeSparseMoeBlock",
    "Qwen3MoeSparseMoeBlock",
)
_PER_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_SHARED = ("shared_experts", "shared_expert")
_ROUTED = ("routed_gate", "routed_up", "routed_down")
_SIZES = (
    "hidden_size", "intermediate_size", "num_experts", "topk", "shared_intermediate_size",
)  # fmt: skip
_TOLERANCE = 1e-6  # between two formulas of SiLU in FP32


@dataclass(frozen=True)
class Layout:
    """Where a block keeps its weights.

    Attributes:
        per_expert: names of the gate, up and down layers in each of a list of experts; None if they
            are stacked, gate above up.
        shared: the name of the shared expert, or None.
        returns_logits: the block returns (output, router logits).
    """

    per_expert: tuple[str, str, str] | None
    shared: str | None
    returns_logits: bool


class HFLayer(MoELayer):
    """A MoELayer with the results and the state dict of the block that it replaces."""

    layout: Layout

    def forward(self, x: Tensor, *_: Any) -> Any:  # type: ignore[override]
        if not self.layout.returns_logits:
            return super().forward(x)
        assert self.router is not None
        flat = x.reshape(-1, x.shape[-1])
        logits, weights, ids = self.router(flat)
        return self._compute(flat, weights, ids).reshape(x.shape).to(x.dtype), logits

    def _route(
        self, flat: Tensor, weights: Tensor | None, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        first, second = super()._route(flat, weights, ids)
        # DeepSeek-V3 of transformers 4 returns the ids first.
        return (first, second) if first.is_floating_point() else (second, first)


@cache
def _recorded_class(block: Any) -> type[HFLayer]:
    """An HFLayer that also is a ``block``: transformers 4 collects the router logits, from which it
    makes the load-balancing loss, from what instances of the block's class return."""
    return type(block.__name__, (HFLayer, block), {"__doc__": HFLayer.__doc__})


def is_moe_block(module: nn.Module) -> bool:
    """Whether ``from_hf`` takes this module."""
    if isinstance(module, MoELayer):
        return False
    return any(cls.__name__ in BLOCKS for cls in type(module).__mro__)


def from_hf(module: nn.Module, **options: Any) -> MoELayer:
    """The layer that computes what an MoE block of transformers does.

    Router, shared expert and down weights are the block's own parameters; stacked gate and up
    weights are split, which copies them.

    Args:
        module: a block of one of the ``BLOCKS`` classes.
        options: group, config, max_tokens, recompute and main_grad, as for ``MoELayer``.

    Raises:
        MokError: the block has another class, or something that the layer does not compute.
        ShapeError, DtypeError: sizes or dtypes beyond the limits of ``MoELayer``.
    """
    if not is_moe_block(module):
        raise MokError(
            "from_hf takes an MoE block of transformers",
            type(module).__name__,
            f"Supported: {', '.join(BLOCKS)}",
        )
    fixed = set(options) & {"router", "device", "dtype", "gated_shared", *_SIZES}
    if fixed:
        raise MokError("the block decides these options of the layer", ", ".join(sorted(fixed)))
    for name in ("gate", "experts"):
        if not isinstance(getattr(module, name, None), nn.Module):
            raise MokError(
                f"the block must have the module {name}", repr(getattr(module, name, None))
            )
    if getattr(module, "jitter_noise", 0):
        raise MokError(
            "router jitter is not supported", module.jitter_noise, "Set router_jitter_noise to 0"
        )
    (gate, up, down), per_expert = _read_experts(module.experts)
    shared_name = next((n for n in _SHARED if getattr(module, n, None) is not None), None)
    shared = _read_mlp(getattr(module, shared_name)) if shared_name is not None else None
    shared_scale = getattr(module, "shared_expert_gate", None)
    _check_members(module, {"gate", "experts", shared_name, "shared_expert_gate"})
    router, returns_logits = _read_router(module, len(down))
    topk = _topk(module)
    wanted = (len(down), down.shape[1])
    weight = getattr(module.gate, "weight", None)
    if isinstance(weight, Tensor) and tuple(weight.shape) != wanted:
        raise ShapeError(
            f"the router's weight must have the shape [E, H] = {list(wanted)}", list(weight.shape)
        )
    block: Any = type(module)
    kind = _recorded_class(block) if returns_logits else HFLayer
    layer = kind(
        down.shape[1],
        down.shape[2],
        len(down),
        topk,
        shared_intermediate_size=None if shared is None else shared[0].shape[0],
        gated_shared=shared_scale is not None,
        router=router,
        device="meta",
        dtype=down.dtype,
        **options,
    )
    layer.layout = Layout(per_expert, shared_name, returns_logits)
    local = slice(layer.expert_ids[0], layer.expert_ids[-1] + 1) if layer.expert_ids else slice(0)
    for name, weight in zip(_ROUTED, (gate, up, down), strict=True):
        whole = isinstance(weight, nn.Parameter) and len(layer.expert_ids) == len(weight)
        setattr(layer, name, weight if whole else _parameter(weight[local], down))
    if shared is not None:
        layer.shared_gate, layer.shared_up, layer.shared_down = shared
    if shared_scale is not None:
        layer.shared_scale = _parameter(shared_scale.weight[0], shared_scale.weight)
    if len(layer.expert_ids) == len(down):
        layer.register_state_dict_post_hook(_to_block)
        layer.register_load_state_dict_pre_hook(_from_block)
    return layer.train(module.training)


def replace_moe(model: nn.Module, **options: Any) -> nn.Module:
    """Replace every MoE block of a model, in place, by ``from_hf`` of it.

    Make the optimizer afterwards: gate and up weights are new parameters.

    Args:
        model: a transformers model, or any module that holds blocks of the ``BLOCKS`` classes.
        options: as for ``from_hf``.

    Returns:
        The model.

    Raises:
        MokError: it has no such block; and what ``from_hf`` raises: the blocks before that one are
            replaced then.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError("the model must be a torch module", f"a {type(model).__name__}")
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # also what is there twice
            if child is not None and is_moe_block(child):
                places.setdefault(child, []).append((parent, name))
    if not places:
        raise MokError(
            "the model must hold MoE blocks that from_hf takes",
            type(model).__name__,
            f"Supported: {', '.join(BLOCKS)}",
        )
    # One block after the other lets go of its memory; one in several places stays one.
    queue = list(places.items())[::-1]
    del places, parent, child
    while queue:
        block, where = queue.pop()
        layer = from_hf(block, **options)
        for parent, name in where:
            setattr(parent, name, layer)
    return model


# ---------------------------------------------------------------------- reading a block


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone().contiguous(), requires_grad=like.requires_grad)


def _read_experts(
    experts: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[str, str, str] | None]:
    """Gate, up and down [E, ...] and how they are named; parameters where nothing is copied."""
    if isinstance(experts, nn.ModuleList):
        if not len(experts):
            raise MokError("a block must have experts", "an empty list")
        names = next((n for n in _PER_EXPERT if hasattr(experts[0], n[0])), None)
        if names is None:
            raise MokError("experts must have gate, up and down layers", type(experts[0]).__name__)
        parts = [_read_mlp(expert, names) for expert in experts]
        inner, hidden = parts[0][0].shape
        sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
        for e, part in enumerate(parts):
            for name, weight, size in zip(names, part, sizes, strict=True):
                if tuple(weight.shape) != size:
                    raise ShapeError(
                        f"{name} of expert {e} must have the shape {list(size)}",
                        list(weight.shape),
                    )
                if weight.dtype != parts[0][0].dtype:
                    raise DtypeError(
                        f"all experts must have one dtype, {parts[0][0].dtype}",
                        f"{weight.dtype} in {name} of expert {e}",
                    )
        stacked = [_parameter(torch.stack([p[i] for p in parts]), parts[0][i]) for i in range(3)]
        return (stacked[0], stacked[1], stacked[2]), names
    _check_members(experts, {"gate_up_proj", "down_proj", "act_fn"})
    _check_silu(experts)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    count, hidden, inner = down.shape
    if gate_up.shape != (count, 2 * inner, hidden):
        raise ShapeError(
            f"gate_up_proj must have the shape [E, 2I, H] = {[count, 2 * inner, hidden]}",
            list(gate_up.shape),
        )
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    return (gate, up, down), None


def _read_mlp(
    mlp: nn.Module, names: tuple[str, str, str] = _PER_EXPERT[0]
) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    _check_members(mlp, {*names, "act_fn"})
    _check_silu(mlp)
    missing = [name for name in names if not hasattr(getattr(mlp, name, None), "weight")]
    if missing:
        raise MokError(f"{type(mlp).__name__} must have the layers {', '.join(names)}", missing)
    gate, up, down = (getattr(mlp, name).weight for name in names)
    return gate, up, down


def _check_members(module: nn.Module, known: set[str | None]) -> None:
    """Refuse parameters and submodules that the layer would leave out."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_children())
    biases = [f"{n}.bias" for n, m in own.items() if getattr(m, "bias", None) is not None]
    strange = [*sorted(set(own) - known), *biases]  # type: ignore[operator]
    if strange:
        raise MokError(
            f"{type(module).__name__} has parts that the layer does not compute", strange
        )


def _check_silu(module: Any) -> None:
    act = getattr(module, "act_fn", None)
    values = torch.linspace(-8, 8, 33)
    if act is None or not torch.allclose(act(values), nn.functional.silu(values), atol=_TOLERANCE):
        raise MokError("the experts' activation must be SiLU", act)


def _topk(module: Any) -> int:
    for owner in (module, module.gate, getattr(module, "config", None)):
        for name in ("top_k", "num_experts_per_tok"):
            value = getattr(owner, name, None)
            if value is not None:
                found = index_of(value)
                if found is None:
                    raise DtypeError(f"the block's {name} must be an int", repr(value))
                return found
    raise MokError("the block must say how many experts a token has", type(module).__name__)


def _read_router(module: Any, num_experts: int) -> tuple[nn.Module, bool]:
    """The router, and whether the block returns its logits."""
    gate = module.gate
    if not isinstance(gate, nn.Linear):
        return gate, False
    if gate.bias is not None:
        raise MokError("the router must have no bias", "gate.bias")
    if not gate.weight.is_floating_point():
        raise DtypeError("the router's weight must be a float", gate.weight.dtype)
    router = Router(
        gate.in_features,
        num_experts,
        _topk(module),
        normalize=bool(getattr(module, "norm_topk_prob", True)),
        fp32=False,
        device="meta",
    )
    router.weight = gate.weight
    return router.train(module.training), True


# ---------------------------------------------------------------------- state dicts


def _pairs(layer: HFLayer, prefix: str) -> Iterator[tuple[str, str]]:
    """(our key, the block's key) of everything that only has another name."""
    if layer.layout.shared is not None:
        mlp = f"{prefix}{layer.layout.shared}."
        yield f"{prefix}shared_gate", f"{mlp}gate_proj.weight"
        yield f"{prefix}shared_up", f"{mlp}up_proj.weight"
        yield f"{prefix}shared_down", f"{mlp}down_proj.weight"
    assert layer.router is not None
    for name in layer.router.state_dict():
        yield f"{prefix}router.{name}", f"{prefix}gate.{name}"


def _to_block(layer: HFLayer, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Our state dict to the block's, in place."""
    gate, up, down = (state.pop(prefix + name) for name in _ROUTED)
    names = layer.layout.per_expert
    if names is None:
        state[f"{prefix}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{prefix}experts.down_proj"] = down
    else:
        for e in range(len(down)):
            for name, weight in zip(names, (gate, up, down), strict=True):
                # Copies: some formats refuse tensors that share memory.
                state[f"{prefix}experts.{e}.{name}.weight"] = weight[e].clone()
    for ours, theirs in _pairs(layer, prefix):
        state[theirs] = state.pop(ours)
    if layer.shared_scale is not None:
        state[f"{prefix}shared_expert_gate.weight"] = state.pop(f"{prefix}shared_scale")[None]


def _from_block(layer: HFLayer, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """The block's state dict to ours, in place; keys that are absent stay absent.

    The last argument is torch's list of error messages.
    """
    names = layer.layout.per_expert
    if names is None:
        gate_up = state.pop(f"{prefix}experts.gate_up_proj", None)
        if gate_up is not None:
            gate, up = gate_up.chunk(2, dim=1)
            state[f"{prefix}routed_gate"] = gate.contiguous()
            state[f"{prefix}routed_up"] = up.contiguous()
        down = state.pop(f"{prefix}experts.down_proj", None)
        if down is not None:
            state[f"{prefix}routed_down"] = down
    else:
        for name, ours in zip(names, _ROUTED, strict=True):
            keys = [f"{prefix}experts.{e}.{name}.weight" for e in range(layer.spec.num_experts)]
            found = [k for k in keys if k in state]  # a shard, say, has only some of them
            wrong = [k for k in found if state[k].shape != state[found[0]].shape]
            if wrong:
                rest[-1].append(
                    f"size mismatch for {wrong[0]}: {list(state[wrong[0]].shape)}, and of {found[0]} "
                    f"{list(state[found[0]].shape)}"
                )
            elif len(found) == len(keys):
                state[prefix + ours] = torch.stack([state.pop(key) for key in keys])
    for ours, theirs in _pairs(layer, prefix):
        if theirs in state:
            state[ours] = state.pop(theirs)
    scale = state.pop(f"{prefix}shared_expert_gate.weight", None)
    if scale is not None:
        state[f"{prefix}shared_scale"] = scale[0]

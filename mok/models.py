"""Public model shapes and machines, as data.

Model dimensions are those of the published configurations. ``shared_intermediate_size`` is the
width of all shared experts together, or None. Every entry says where its figures come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.errors import MokError


@dataclass(frozen=True)
class ModelShape:
    """The MoE layer of a public model.

    H, I, E and K of the design are ``hidden_size``, ``intermediate_size`` (one routed expert),
    ``num_experts`` (routed) and ``topk``.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    shared_intermediate_size: int | None
    note: str


@dataclass(frozen=True)
class Machine:
    """One GPU type: its number of streaming multiprocessors and its compile target."""

    name: str
    num_sms: int
    arch: str
    note: str


MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape("kimi-k2.5", 7168, 2048, 384, 8, 2048, "config.json; one shared expert"),
        ModelShape("deepseek-v3", 7168, 2048, 256, 8, 2048, "config.json; one shared expert"),
        ModelShape("qwen3-30b-a3b", 2048, 768, 128, 8, None, "config.json; no shared expert"),
        ModelShape("qwen3-235b-a22b", 4096, 1536, 128, 8, None, "config.json; no shared expert"),
        ModelShape("glm-5.2", 6144, 2048, 256, 8, 2048, "config.json; one shared expert"),
        ModelShape("mixtral-8x7b", 4096, 14336, 8, 2, None, "config.json; no shared expert"),
        ModelShape("olmoe", 2048, 1024, 64, 8, None, "config.json; no shared expert"),
        ModelShape(
            "qwen3.5-397b", 4096, 1024, 512, 10, 1024, "MoK's tests; shared expert has a gate"
        ),
        ModelShape("deepseek-v4-pro", 7168, 3072, 384, 6, 3072, "MoK's tests; one shared expert"),
    )
}

MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        Machine("h100", 132, "sm_90a", "SXM5 data sheet; the PCIe card has 114"),
        Machine("h200", 132, "sm_90a", "SXM5 data sheet"),
        Machine("b200", 148, "sm_100a", "DGX B200"),
        Machine("gb200", 148, "sm_100a", "taken equal to B200; doctor shows what a device reports"),
        Machine("b300", 148, "sm_103a", "the figure in MoK's two-wave example"),
        Machine("gb300", 148, "sm_103a", "the figure in MoK's two-wave example"),
    )
}


def get_model(name: str) -> ModelShape:
    """The model called ``name``; raises MokError that lists the known ones."""
    try:
        return MODELS[name]
    except KeyError:
        known = ", ".join(MODELS)
        raise MokError("the model must be a known one", repr(name), f"Known: {known}") from None


def get_machine(name: str) -> Machine:
    """The machine called ``name`` (upper or lower case); raises MokError that lists the known."""
    try:
        return MACHINES[name.lower()]
    except KeyError:
        known = ", ".join(MACHINES)
        raise MokError("the machine must be a known one", repr(name), f"Known: {known}") from None

"""Sizes, tunables, groups and machines that no layer runs with: each gets an error that names it."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.errors import (
    DeviceError,
    DriverError,
    DtypeError,
    GroupError,
    MissingDependencyError,
    MokError,
    ResourceError,
    ShapeError,
)
from mok.runtime import device as runtime_device
from mok.runtime import driver
from mok.runtime.group import Group
from mok.runtime.launch import set_active_emulator
from mok.runtime.workspace import Workspace
from tests.helpers_bad_input import (
    KINDS,
    E,
    H,
    I,
    K,
    T,
    arguments,
    ids,
    schedule_of,
    workspace,
)
from tests.helpers_layer import SMALL, refused

SIZES = [
    ({"topk": 33}, ShapeError, "topk", "32", "33"),
    ({"topk": 0}, ShapeError, "topk", "1", "0"),
    ({"hidden_size": 100}, ShapeError, "hidden_size", "multiple of 64", "100", "128"),
    ({"intermediate_size": 32}, ShapeError, "intermediate_size", "64", "32"),
    ({"intermediate_size": 0}, ShapeError, "intermediate_size", "at least 1", "0"),
    ({"shared_intermediate_size": 65}, ShapeError, "shared_intermediate_size", "64", "65"),
    ({"num_experts": 0}, ShapeError, "num_experts", "at least 1", "0"),
    ({"num_experts": 2.0}, DtypeError, "num_experts", "int", "2.0"),
    ({"hidden_size": "128"}, DtypeError, "hidden_size", "int", "'128'"),
    ({"max_tokens": -1}, ShapeError, "max_tokens", "-1"),
    ({"max_tokens": 1.5}, DtypeError, "max_tokens", "int", "1.5"),
    ({"max_tokens": 2**30, "hidden_size": 64}, MokError, "max_tokens", "must be"),
    ({"num_experts": 6000}, ShapeError, "experts", "5632", "6000", "ranks"),
]


@pytest.mark.parametrize(("changes", "error", "words"), [(c, e, w) for c, e, *w in SIZES], ids=str)
def test_sizes(idle, changes, error, words):
    with refused(error, *words):
        workspace(**changes)


CONFIGS = [
    ({"minibatch_size": 100}, ShapeError, "minibatch_size", "multiple of 128", "100"),
    ({"minibatch_size": 0}, ShapeError, "minibatch_size", "0"),
    ({"macrobatch_size": 200}, ShapeError, "macrobatch_size", "multiple", "200"),
    ({"fwd_num_comm_sms": 0}, ShapeError, "fwd_num_comm_sms", "at least 1", "0"),
    ({"fwd_num_comm_sms": 2.5}, DtypeError, "fwd_num_comm_sms", "int", "2.5"),
    ({"reserved_sms": -1}, ShapeError, "reserved_sms", "-1"),
    ({"timeout_s": 0.0}, ShapeError, "timeout_s", "positive", "0.0"),
    ({"timeout_s": float("nan")}, ShapeError, "timeout_s", "finite", "nan"),
    ({"schedule_capacity_multiplier": -0.5}, ShapeError, "schedule_capacity", "-0.5"),
    ({"schedule_capacity_multiplier": "1"}, DtypeError, "schedule_capacity", "number", "'1'"),
]


@pytest.mark.parametrize(
    ("changes", "error", "words"), [(c, e, w) for c, e, *w in CONFIGS], ids=str
)
def test_tunables(changes, error, words):
    with refused(error, *words):
        dataclasses.replace(SMALL, **changes)


FEW_SMS = [  # on 6 SMs
    (2, {"fwd_num_comm_sms": 6}),
    (2, {"bwd_num_comm_sms": 6}),
    (2, {"fwd_num_comm_sms": 3, "reserved_sms": 3}),
    (1, {"reserved_sms": 6}),
    (1, {"reserved_sms": 100}),
]


@pytest.mark.parametrize(("ep_size", "changes"), FEW_SMS, ids=str)
def test_too_few_free_sms(idle, ep_size, changes):
    config = dataclasses.replace(SMALL, **changes)
    with refused(ResourceError, "SMs", "comm", "6", "lower"):
        workspace(ep_size, config)
    # The tunables of a call may differ from those the workspace was made with.
    if "bwd_num_comm_sms" not in changes:
        with workspace(ep_size) as made, refused(ResourceError, "SMs", "comm", "lower"):
            functional.forward(config, made, schedule_of(made), *arguments(ep_size).values())


def test_comm_sms_do_not_count_on_one_rank(idle):
    workspace(1, dataclasses.replace(SMALL, fwd_num_comm_sms=6)).close()


@pytest.mark.parametrize(
    "changes",
    [{"minibatch_size": 256}, {"macrobatch_size": 128}, {"macrobatch_size": 512}],
    ids=str,
)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_call_cannot_change_what_buffers_are_sized_by(idle, ep_size, changes):
    config = dataclasses.replace(SMALL, **changes)
    (name,) = changes
    with workspace(ep_size, max_tokens=600) as made, refused(MokError, name):
        functional.forward(config, made, schedule_of(made), *arguments(ep_size).values())


@pytest.mark.parametrize("make", [functional.create_workspace, functional.get_workspace])
def test_what_no_workspace_is_made_with(idle, make):
    sizes = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "topk": K, "max_tokens": T}
    group = Group.virtual(1, torch.device("cpu"))
    for value in KINDS:
        with refused(DtypeError, "config must be a Config", type(value).__name__):
            make(value, group, **sizes)
    for value in ({}, "x", 3):
        with refused(DtypeError, "group must be a Group", type(value).__name__):
            make(SMALL, value, **sizes)
    set_active_emulator(None)
    for value in ("nodevice", {}):
        with refused(DeviceError, "one that torch knows", repr(value)):
            make(SMALL, None, device=value, **sizes)


def test_what_no_config_is_suggested_for():
    shape = Shape(8, 64, 64, 4, 2)
    with refused(DtypeError, "mok.Shape", "str"):
        Config.suggest("x", "h200")  # type: ignore[arg-type]
    with refused(DtypeError, "precision", "'fp4'"):
        Config.suggest(shape, "h200", "fp4")
    for device in (None, 3.5, {}):
        with refused(DeviceError, "needs a GPU", "'h200'"):
            Config.suggest(shape, device)


@pytest.mark.parametrize("size", ["x", None, 1.5, True, 10**9, -1])
def test_what_is_no_number_of_virtual_ranks(size):
    with refused(GroupError, "1…4096", repr(size)):
        Group.virtual(size)


@pytest.fixture
def fake_driver(monkeypatch):
    """A driver of a given version (None: there is no driver)."""

    def install(version: int | None) -> None:
        def missing(*_: Any) -> Any:
            raise RuntimeError("no libcuda.so.1")

        success = SimpleNamespace(CUDA_SUCCESS=0)
        fake = SimpleNamespace(
            CUresult=success,
            cuInit=missing if version is None else lambda _: (0,),
            cuDriverGetVersion=missing if version is None else lambda: (0, version),
        )
        monkeypatch.setattr(driver, "bindings", lambda: fake)
        monkeypatch.setattr(runtime_device, "bindings", lambda: fake)

    for cache in (driver.init, runtime_device._device_info):
        cache.cache_clear()
    yield install
    for cache in (driver.init, runtime_device._device_info):
        cache.cache_clear()


def on_gpu() -> None:
    functional.create_workspace(
        SMALL, device="cuda:0", max_tokens=T, hidden_size=H, intermediate_size=I,
        num_experts=E, topk=K,
    )  # fmt: skip


def test_a_driver_that_is_too_old(fake_driver):
    fake_driver(12080)
    with refused(DriverError, "580", "12.8", "update"):
        on_gpu()


def test_no_driver(fake_driver):
    fake_driver(None)
    with refused(DriverError, "driver", "no libcuda", "580"):
        on_gpu()


def test_a_workspace_on_the_cpu():
    with refused(DeviceError, "CUDA", "cpu", "cuda"):
        functional.create_workspace(
            SMALL, device="cpu", max_tokens=T, hidden_size=H, intermediate_size=I,
            num_experts=E, topk=K,
        )  # fmt: skip


@pytest.mark.parametrize("module", ["cutlass", "cutlass.cute"])
def test_a_missing_dsl(standin, monkeypatch, module):
    for name in [n for n in sys.modules if n.split(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with workspace() as made, refused(MissingDependencyError, "CuTe DSL", module, "pip install"):
        functional.build_schedule(made, SMALL, ids())


def test_cuda_python_is_missing(fake_driver, monkeypatch):
    monkeypatch.undo()
    driver.bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    try:
        with refused(MissingDependencyError, "cuda-python", "pip install"):
            on_gpu()
    finally:
        driver.bindings.cache_clear()


def test_ep_size_is_the_groups(idle):
    with refused(GroupError, "ep_size", "3", "2"):
        Workspace(
            Group.virtual(2),
            Shape(0, H, I, E, K, 3),
            SMALL,
            T,
            torch.device("cpu"),
            "sm_90a",
            "host",
        )

"""setmaxnreg: the registers of a CTA are a pool that its warps give to and take from."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mok.tools.emulator import layout as L
from mok.tools.emulator.errors import EmulatorError, LaunchError

if TYPE_CHECKING:
    from mok.tools.emulator.encode import Program
    from mok.tools.emulator.machine import Machine
    from mok.tools.emulator.resident import Cta, Warp

FILE = 65536  # registers of an SM
LOWEST, HIGHEST, STEP = 24, 256, 8  # what setmaxnreg accepts
GROUP = 4  # warps of a warpgroup


@dataclass
class RegisterPool:
    """Registers per thread of each warp, and what nobody holds now.  Counts are per warp (× 32)."""

    held: list[int]
    free: int = 0
    history: list[list[tuple[str, int]]] = field(default_factory=list)  # per warp


def launch_registers(program: "Program", threads: int) -> int | None:
    """Registers per thread at the launch, or None when nothing caps them.

    ptxas honours setmaxnreg only under a cap: ``.maxnreg``, or ``.minnctapersm`` with a fixed block.
    It then takes what the cap leaves, but no more than the kernel asks for.
    """
    directives = program.kernel.directives
    cap = 0
    if "maxnreg" in directives:
        cap = directives["maxnreg"][0]
    elif "minnctapersm" in directives and directives.keys() & {"reqntid", "maxntid"}:
        warps = -(-threads // 32)
        cap = FILE // (32 * warps * max(1, directives["minnctapersm"][0])) // STEP * STEP
    if cap == 0:
        return None
    wanted = [
        o.ins.operands[0][1]
        for o in program.pyops
        if o.ins.name.startswith("setmaxnreg.inc") and o.ins.operands[0][0] == "i"
    ]
    return min([cap, HIGHEST, max(wanted)] if wanted else [cap, HIGHEST])


def resident_blocks(program: "Program", threads: int) -> int:
    """How many blocks' registers an SM holds; without setmaxnreg only ptxas knows, so all of them."""
    uses_pool = any(o.ins.name.startswith("setmaxnreg") for o in program.pyops)
    registers = launch_registers(program, threads) if uses_pool else None
    return FILE // (registers * (-(-threads // 32) * 32)) if registers else FILE


def check_registers(program: "Program", threads: int) -> None:
    """Raises LaunchError when a block's registers exceed the SM's."""
    cap = program.kernel.directives.get("maxnreg")
    if cap and cap[0] * (-(-threads // 32) * 32) > FILE:
        raise LaunchError(
            f"a block's registers must fit the {FILE} of an SM",
            f"{threads} threads with .maxnreg {cap[0]}",
            "use fewer threads or registers",
        )


def pool_of(machine: "Machine", cta: "Cta", registers: int) -> RegisterPool:
    if "registers" not in cta.extra:
        n = len(cta.warps)
        cta.extra["registers"] = RegisterPool([registers] * n, 0, [[] for _ in range(n)])
    pool: RegisterPool = cta.extra["registers"]
    return pool


def op_setmaxnreg(machine: "Machine", w: "Warp", op: Any) -> Any:
    """setmaxnreg: gives registers to the CTA's pool, or takes some and waits until it has them"""
    from mok.tools.emulator.resident import WAIT

    what = op.ins.mods[1]
    count = w.value(op.operands[0], w.lanes()[0])
    if not LOWEST <= count <= HIGHEST or count % STEP:
        raise EmulatorError(
            f"setmaxnreg takes a multiple of {STEP} from {LOWEST} to {HIGHEST}", count
        )
    registers = launch_registers(machine.program, machine.threads)
    if registers is None:
        machine.warn(
            "setmaxnreg has no effect in a kernel without a register cap: launch it with a fixed "
            "block size and min_blocks_per_mp"
        )
        return None
    index = int(w.state[L.W_INDEX])
    pool = pool_of(machine, w.cta, registers)
    held = pool.held[index]
    if (count > held) if what == "dec" else (count < held):
        raise EmulatorError(
            f"setmaxnreg.{what} may not {'raise' if what == 'dec' else 'lower'} a warp's registers",
            f"from {held} to {count}, launched with {registers}",
        )
    if count - held > pool.free:
        others = sum(h - LOWEST for i, h in enumerate(pool.held) if i != index)
        if count - held > pool.free + others:
            raise EmulatorError(
                "a setmaxnreg.inc must fit the registers that the block was launched with",
                f"{count} for each thread, launched with {registers} for each of {machine.threads}",
                "let other warps give up more, or ask for less",
            )
        w.wait = (
            f"{count - held} × 32 registers of its block's pool, which has {pool.free} × 32 "
            f"(launched with {registers} for each thread)"
        )
        return WAIT
    pool.free -= count - held
    pool.held[index] = count
    pool.history[index].append((what, count))
    machine.sync_event()
    return None


def check_exit(machine: "Machine", cta: "Cta") -> None:
    """PTX wants every warp of a warpgroup to execute the same setmaxnreg; working kernels do not."""
    pool: RegisterPool | None = cta.extra.get("registers")
    if pool is None:
        return
    for first in range(0, len(pool.held), GROUP):
        group = pool.history[first : first + GROUP]
        if any(h != group[0] for h in group):
            machine.warn(
                "all warps of a warpgroup should execute the same setmaxnreg: "
                f"warps {first} to {first + len(group) - 1} execute {group}"
            )


HANDLERS = {"setmaxnreg": op_setmaxnreg}

"""Every checker: a kernel that breaks the rule, and its repaired twin that gives no report."""

import numpy as np
import pytest

from mok.tools.emulator import KernelFault, LaunchError
from tests.tools.emulator.mutated import KERNELS
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator
TID = "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nshl.b32 %r2, %r0, 2;\nadd.s32 %r3, %r1, %r2;\n"


def out():
    return np.zeros(64, dtype=np.uint32)


def exchange(barrier):
    """64 threads: each writes its word and reads its partner's in the other warp."""
    return kernel(
        TID + "st.shared.b32 [%r3], %r0;\n" + barrier + "\nxor.b32 %r4, %r2, 128;\n"
        "add.s32 %r4, %r4, %r1;\nld.shared.b32 %r5, [%r4];\nld.param.u64 %d0, [p0];\n"
        "cvt.u64.u32 %d1, %r2;\nadd.s64 %d0, %d0, %d1;\nst.global.b32 [%d0], %r5;",
        shared=256,
    )


def test_a_race_between_warps():
    data = out()
    with pytest.raises(KernelFault, match=r"data race|nothing has written"):
        run(exchange(""), data, threads=64, check=True)
    run(exchange("bar.sync 0;"), data, threads=64, check=True)
    np.testing.assert_array_equal(data, np.arange(64) ^ 32)


def test_a_race_is_reported_with_both_sides():
    with pytest.raises(KernelFault) as error:
        run(exchange(""), out(), threads=64, check=True)
    text = str(error.value)
    assert "st.shared.b32" in text and "ld.shared.b32" in text and "warp" in text


def test_every_reader_of_an_overwritten_word_is_named():
    """Three warps read a word, each by its own line; the fourth overwrites it without waiting."""
    reads = "".join(
        f"setp.eq.u32 %p2, %r4, {n};\n@%p2 ld.shared.b32 %r1{n}, [%r1];\n" for n in (1, 2, 3)
    )
    text = kernel(
        TID + "shr.u32 %r4, %r0, 5;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared.b32 [%r1], 1;\n"
        f"bar.sync 0;\n{reads}@!%p1 bra E;\nmov.u32 %r5, 20000;\n"
        "LATER: sub.u32 %r5, %r5, 1;\nsetp.ne.u32 %p3, %r5, 0;\n@%p3 bra LATER;\n"
        "st.shared.b32 [%r1], 2;\nE:",
        shared=64,
    )
    with pytest.raises(KernelFault) as error:
        run(text, out(), threads=128, check=True)
    found = error.value.report.findings
    assert len(found) == 3
    for n, finding in enumerate(sorted(found, key=lambda f: f.other), 1):
        assert "st.shared.b32 [%r1], 2" in finding.where
        assert f"warp {n}" in finding.other and f"ld.shared.b32 %r1{n}" in finding.other


def test_reading_what_nothing_wrote():
    text = kernel(TID + "ld.shared.b32 %r4, [%r3];", shared=256)
    with pytest.raises(KernelFault, match="nothing has written"):
        run(text, out(), check=True)


@pytest.mark.parametrize(
    "address,rule",
    [("[smem+4096]", "out of bounds"), ("[smem+2]", "misaligned"), ("[smem+4]", None)],
)
def test_shared_bounds_and_alignment(address, rule):
    text = kernel(f"st.shared.b32 {address}, 1;", shared=256)
    if rule is None:
        run(text, out())
    else:
        with pytest.raises(KernelFault, match=rule):
            run(text, out())


def test_global_accesses_stay_in_registered_memory():
    text = kernel("ld.param.u64 %d0, [p0];\nst.global.b32 [%d0+256], 1;")
    with pytest.raises(KernelFault, match="outside every registered"):
        run(text, out())


BARRIER = (
    TID + "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra I;\nmbarrier.init.shared.b64 [%r1], 2;\nI:\n"
    "bar.sync 0;\n"
)
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;\n@%p2 bra E;\nbra W;\nE:\n"


def test_deadlock_names_the_wait():
    text = kernel(BARRIER + "@%p1 bra W;\nmbarrier.arrive.shared.b64 _, [%r1];\n" + WAIT, shared=64)
    with pytest.raises(KernelFault, match=r"deadlock(.|\n)*1 of 2 arrivals"):
        run(text, out())
    twice = (
        "@%p1 bra W;\nmbarrier.arrive.shared.b64 _, [%r1];\nmbarrier.arrive.shared.b64 _, [%r1];\n"
    )
    run(kernel(BARRIER + twice + WAIT, shared=64), out())


def test_too_many_arrivals():
    text = kernel(BARRIER + "mbarrier.arrive.shared.b64 _, [%r1], 3;", shared=64)
    with pytest.raises(KernelFault, match="more arrivals"):
        run(text, out())


def test_an_uninitialised_barrier():
    text = kernel(TID + "mbarrier.arrive.shared.b64 _, [%r1];", shared=64)
    with pytest.raises(KernelFault, match="no initialised mbarrier"):
        run(text, out())


def flag(release, acquire):
    """CTA 0 writes data, then a flag; CTA 1 polls the flag, then reads the data."""
    return kernel(
        "mov.u32 %r0, %ctaid.x;\nld.param.u64 %d0, [p0];\nmov.u32 %r9, %tid.x;\n"
        "setp.ne.u32 %p3, %r9, 0;\n@%p3 bra E;\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra R;\n"
        f"st.global.b32 [%d0], 42;\nst.{release}.gpu.global.b32 [%d0+128], 1;\nbra E;\nR:\n"
        f"ld.{acquire}.gpu.global.b32 %r1, [%d0+128];\nsetp.eq.u32 %p2, %r1, 0;\n@%p2 bra R;\n"
        "ld.global.b32 %r2, [%d0];\nst.global.b32 [%d0+64], %r2;\nE:",
    )


@pytest.mark.parametrize("release,acquire", [("relaxed", "acquire"), ("release", "relaxed")])
def test_message_passing_needs_both_ends(release, acquire):
    for seed in range(4):
        data = out()
        with pytest.raises(KernelFault, match="data race"):
            run(flag(release, acquire), data, grid=2, seed=seed, check=True)
    data = out()
    run(flag("release", "acquire"), data, grid=2, seed=0, check=True)
    assert data[16] == 42


def test_a_seed_gives_the_same_run_again():
    steps = set()
    for _ in range(3):
        data = out()
        report = run(flag("release", "acquire"), data, grid=2, seed=7, check=True)
        steps.add(report.launches[0].steps)
    assert len(steps) == 1


@pytest.mark.parametrize(
    "options,rule",
    [
        ({"arch": "sm_100a"}, "this emulator runs"),
        ({"cluster": 2}, "multiple of the cluster"),
        ({"threads": 2048}, "1 to 1024"),
    ],
)
def test_launches_that_cannot_run(options, rule):
    from tests.tools.emulator import ptx

    text = kernel("")
    with pytest.raises(LaunchError, match=rule):
        if options.get("arch"):
            text = text.replace("ret;", "ret;")
            saved, ptx.HEAD = ptx.HEAD, ptx.HEAD.replace("{arch}", "sm_90a")
            try:
                run(text, out(), **options)
            finally:
                ptx.HEAD = saved
        else:
            run(text, out(), **options)


@pytest.mark.parametrize(
    "body,right",
    [
        ("barrier.cluster.arrive;\nbarrier.cluster.wait;\n" * 2, True),
        ("barrier.cluster.arrive;\nmov.u32 %r0, 1;\nbarrier.cluster.wait;", True),
        ("barrier.cluster.wait;", False),
        ("barrier.cluster.arrive;\nbarrier.cluster.wait;\nbarrier.cluster.wait;", False),
        ("barrier.cluster.arrive;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;", False),
    ],
)
def test_a_cluster_barrier_is_waited_for_once_after_each_arrival(body, right):
    def go():
        run(kernel(body), out(), grid=2, cluster=2)

    if right:
        go()
    else:
        with pytest.raises(KernelFault, match="cluster barrier misuse"):
            go()


RING = KERNELS["ring of bulk copies"]
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 %d9, [%r3], %r6;"
BARRIER_FAULTS = {
    # Of each fault of the ring: what is replaced, by what, and the report.
    "more bytes than come": (EXPECT, f"mov.u32 %r12, 144;\n{EXPECT[:-4]}%r12;", "deadlock"),
    "fewer bytes than come": (EXPECT, f"mov.u32 %r12, 112;\n{EXPECT[:-4]}%r12;", "bytes"),
    "more arrivals than come": ("[%r1+16], 32;", "[%r1+16], 33;", "deadlock"),
    "the producer's parity": ("[%r4], %r5;", "[%r4], %r21;", "deadlock"),
    "the consumer's parity": ("[%r3], %r21;", "[%r3], %r22;", "deadlock|more arrivals"),
}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("fault", BARRIER_FAULTS)
def test_misuse_of_an_mbarrier(fault, seed):
    right, wrong, report = BARRIER_FAULTS[fault]
    assert RING.text.count(right) == 1
    with pytest.raises(KernelFault, match=report):
        RING.run(lambda text: text.replace(right, wrong), seed)


def two_roles(first, second, count=2, rounds=3):
    """Lane 0 of warp 0 and of warp 1 each repeat their part; barriers at 0 (``count``) and 8 (1)."""

    def repeated(body, name):
        return (
            f"mov.u32 %r10, 0;\nmov.u32 %r11, 0;\n{name}:\n{body}\nxor.b32 %r11, %r11, 1;\n"
            f"add.u32 %r10, %r10, 1;\nsetp.lt.u32 %p5, %r10, {rounds};\n@%p5 bra {name};\nbra E;\n"
        )

    return kernel(
        TID + "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra I;\n"
        f"mbarrier.init.shared.b64 [%r1], {count};\nmbarrier.init.shared.b64 [%r1+8], 1;\nI:\n"
        "bar.sync 0;\nand.b32 %r4, %r0, 31;\nsetp.ne.u32 %p2, %r4, 0;\n@%p2 bra E;\n"
        "setp.ge.u32 %p3, %r0, 32;\n@%p3 bra SECOND;\n"
        + repeated(first, "FIRST")
        + "SECOND:\n"
        + repeated(second, "AGAIN")
        + "E:",
        shared=64,
    )


def arrive(at=0):
    return f"mbarrier.arrive.shared.b64 _, [%r1+{at}];"


def wait(name, at=0, parity="%r11", order=""):
    return (
        f"{name}: mbarrier.try_wait.parity{order}.shared.b64 %p4, [%r1+{at}], {parity};\n"
        f"@!%p4 bra {name};"
    )


SPIN = (
    "mov.u32 %r12, 300;\nLATE: sub.u32 %r12, %r12, 1;\nsetp.ne.u32 %p6, %r12, 0;\n@%p6 bra LATE;\n"
)
MBARRIER_USES = {
    # What the two warps do, and the report.
    "both wait": (arrive() + wait("A"), arrive() + wait("B"), None),
    "one does not wait": (arrive(), arrive() + wait("B"), "may count for that one"),
    "one arrives twice": (
        arrive() + arrive() + wait("A"),
        arrive() + wait("B"),
        "may count for that one|more arrivals",
    ),
    "order by another barrier": (
        arrive() + wait("A", 8),
        arrive() + wait("B") + arrive(8),
        None,
    ),
    "the other barrier is signalled too soon": (
        arrive() + wait("A", 8),
        arrive(8) + arrive() + wait("B"),
        "may count for that one",
    ),
    "a wait of relaxed order": (
        arrive() + wait("A", order=".relaxed.cluster"),
        arrive() + wait("B", order=".relaxed.cluster"),
        None,
    ),
}


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("use", MBARRIER_USES)
def test_an_arrival_follows_the_end_of_the_phase_before(use, seed):
    first, second, rule = MBARRIER_USES[use]
    text = two_roles(first, second)
    if rule is None:
        run(text, out(), threads=64, seed=seed, check=True)
    else:
        with pytest.raises(KernelFault, match=rule):
            run(text, out(), threads=64, seed=seed, check=True, max_steps=100_000)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("between,right", [("wait", True), ("relaxed", True), ("", False)])
def test_execution_order_without_memory_order_suffices_for_an_arrival(between, right, seed):
    """CTA 1 arrives at CTA 0's mbarrier of count 1, then CTA 0 does."""
    both = (
        f"barrier.cluster.arrive{'.relaxed' if between == 'relaxed' else ''};\n" if between else ""
    )
    both += "barrier.cluster.wait;\n" if between else ""
    text = kernel(
        TID + "mov.u32 %r4, %cluster_ctarank;\nsetp.ne.u32 %p1, %r0, 0;\nsetp.ne.u32 %p2, %r4, 0;\n"
        "@!%p1 mbarrier.init.shared.b64 [%r1], 1;\nfence.mbarrier_init.release.cluster;\n"
        "barrier.cluster.arrive;\nbarrier.cluster.wait;\nmov.u32 %r5, 0;\n"
        "mapa.shared::cluster.u32 %r6, %r1, %r5;\nor.pred %p3, %p1, %p2;\nnot.pred %p4, %p2;\n"
        "or.pred %p4, %p1, %p4;\n"
        "@!%p4 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];\n"
        + both
        + "@!%p3 mbarrier.arrive.shared.b64 _, [%r1];\n"
        "barrier.cluster.arrive;\nbarrier.cluster.wait;",
        shared=64,
    )
    options = {"grid": 2, "cluster": 2, "check": True, "seed": seed}
    if right:
        run(text, out(), **options)
    else:
        with pytest.raises(KernelFault, match="may count for that one"):
            run(text, out(), **options)


def test_an_early_arrival_names_the_one_that_it_may_precede():
    first, second, _ = MBARRIER_USES["one does not wait"]
    with pytest.raises(KernelFault) as error:
        run(two_roles(first, second), out(), threads=64, seed=0, check=True)
    found = [f for f in error.value.report.findings if "may count" in f.rule]
    assert found and all("mbarrier.arrive" in f.where for f in found)
    assert all(f.other.startswith("CTA (0, 0, 0) warp ") for f in found)
    assert {f.where.split(",")[2] for f in found} != {f.other.split(",")[2] for f in found}


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("answered", [True, False])
def test_a_phase_that_ends_twice_before_its_waiter_looks(answered, seed):
    """One warp completes phase after phase; the other waits for each, from before they end."""
    first = SPIN + arrive() + (wait("A", 8) if answered else arrive())
    second = wait("B") + arrive(8)
    text = two_roles(first, second, count=1)
    if answered:
        run(text, out(), threads=64, seed=seed, check=True)
    else:
        with pytest.raises(KernelFault, match=r"before it looked(.|\n)*mbarrier\.try_wait"):
            run(text, out(), threads=64, seed=seed, check=True, max_steps=100_000)


@pytest.mark.parametrize(
    "body",
    [
        "mbarrier.init.shared.b64 [%r1+8], 0;",
        "mbarrier.init.shared.b64 [%r1+8], 1048576;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048576;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1048575;\n"
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1;",
    ],
)
def test_counts_that_an_mbarrier_cannot_hold(body):
    text = kernel(BARRIER + f"@%p1 bra E;\n{body}\nE:", shared=64)
    with pytest.raises(KernelFault, match=r"expects 1 to 2\^20 - 1 arrivals"):
        run(text, out())


def copies(expected, issued):
    """One thread: in each of two phases it expects bytes, issues copies of 128 and waits."""
    copy = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%r1+{at}], [%d0], 128, [%r1];\n"
    )
    body = TID + "ld.param.u64 %d0, [p0];\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra E;\n"
    body += "mbarrier.init.shared.b64 [%r1], 1;\n"
    for phase in (0, 1):
        body += f"mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {expected[phase]};\n"
        first = sum(issued[:phase])
        body += "".join(copy.format(at=128 * (1 + first + i)) for i in range(issued[phase]))
        body += f"W{phase}: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], {phase};\n@!%p2 bra W{phase};\n"
    return kernel(body + "E:", shared=1024)


@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.parametrize(
    "expected,issued,rule",
    [
        ((128, 128), (1, 1), None),
        ((256, 256), (2, 2), None),
        ((128, 256), (2, 1), "may count for that one"),
        ((128, 128), (2, 1), "may count for that one|a CTA that has exited"),
    ],
)
def test_bytes_that_no_phase_expects(expected, issued, rule, seed):
    options = {"seed": seed, "check": True, "max_steps": 50_000}
    if rule is None:
        run(copies(expected, issued), out(), **options)
    else:
        with pytest.raises(KernelFault, match=rule):
            run(copies(expected, issued), out(), **options)


@pytest.mark.parametrize("flags,crowded", [(500, False), (40_000, True)])
def test_more_flags_than_the_checkers_follow_give_a_warning(flags, crowded):
    """One warp raises flag after flag; nobody races."""
    text = kernel(
        TID + "ld.param.u64 %d0, [p0];\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra E;\nmov.u32 %r5, 0;\n"
        "NEXT: st.release.gpu.global.b32 [%d0], 1;\nadd.s64 %d0, %d0, 4;\nadd.u32 %r5, %r5, 1;\n"
        f"setp.lt.u32 %p2, %r5, {flags};\n@%p2 bra NEXT;\nE:",
        shared=64,
    )
    report = run(text, np.zeros(flags, dtype=np.uint32), check=True)
    assert any("more barriers and flags" in w for w in report.warnings) == crowded

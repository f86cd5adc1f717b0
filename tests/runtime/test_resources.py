"""Reading ptxas' report, launch code, PTX and SASS as text."""

import pytest

from mok.errors import CompileError
from mok.runtime import resources

LOG = """
\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills
          ptxas output:
          ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to
          determine register count at entry.
          ptxas info    : Compiling entry function
          'forward_0' for 'sm_90a'
          ptxas         .     2920 bytes stack frame, 6972 bytes spill stores, 7160 bytes spill
          loads
          ptxas info    : Used 232 registers, used 3 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'count_a_very_long_symbol_that_the_wrapper_breaks_in_t
          wo_1' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def test_ptxas_log_is_read_through_line_wraps_and_colours():
    kernels, codes = resources.parse_ptxas_log(LOG)
    assert codes == ("C7508",)
    assert kernels["forward_0"] == {
        "registers": 232,
        "barriers": 3,
        "stack": 2920,
        "spill_store": 6972,
        "spill_load": 7160,
        "static_smem": 1024,
    }
    assert kernels["count_a_very_long_symbol_that_the_wrapper_breaks_in_two_1"]["registers"] == 40


def test_a_kernel_without_a_report_is_an_error():
    with pytest.raises(CompileError, match=r"no report for other_0"):
        resources.collect(LOG, ".visible .entry other_0(\n)\n{\nret;\n}", "")


PTX = """
.visible .entry alloc_0(
	.param .u32 alloc_0_param_0
)
{
	.reg .b32 	%r<11>;
	mov.b32 	%r4, 512;
	@%p1 bra 	$L__BB0_2;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], %r4;
	ld.acquire.sys.global.b32 	%r5, [%rd1];
	@!%p2 ld.acquire.sys.global.b32 	%r6, [%rd1];
$L__BB0_2:
	// begin inline asm
	{ fence.acq_rel.sys; }
	ret;
}
.visible .entry other_1()
{
	tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r3], 256;
	ret;
}
"""


def test_tmem_columns_from_register_and_immediate():
    entries = resources.split_entries(PTX)
    assert {k: resources.tmem_columns(v) for k, v in entries.items()} == {
        "alloc_0": 512,
        "other_1": 256,
    }


def test_ptx_instructions_keep_their_modifiers():
    counts = resources.ptx_instructions(PTX)
    assert counts["ld.acquire.sys.global.b32"] == 2
    assert counts["fence.acq_rel.sys"] == 1
    assert counts["bra"] == 1
    assert counts["ret"] == 2


def test_sass_instructions_with_and_without_modifiers():
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.STRONG.SYS R4, [R2.64] ;
        /*0020*/              @UP1 USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0030*/                   LDG.E R4, [R2.64] ;
    .L_x_1:
    """
    assert resources.sass_instructions(sass) == {"LDG": 2, "LDC": 1, "USETMAXREG": 1}
    assert resources.sass_instructions(sass, modifiers=True)["LDG.E.128.STRONG.SYS"] == 1


def test_round_trip_through_json():
    kernel = resources.KernelResources("k_0", 40, 8, 16, 0, 1024, 2048, 3, 512, ("C7508",))
    found = resources.Resources((kernel,))
    assert resources.Resources.from_json(found.to_json()) == found
    assert (found.spill_bytes, found.smem_bytes, found.tmem_columns) == (24, 3072, 512)

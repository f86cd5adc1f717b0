"""Layout of the int64 arrays that compiled code and Python share.  Offsets count 8-byte words."""

from typing import Final

# Instruction record: 16 int32.
CODE_WORDS: Final = 16
(
    I_OP,
    I_GUARD,
    I_GNEG,
    I_D,
    I_A,
    I_B,
    I_C,
    I_E,
    I_X,
    I_Y,
    I_EXT,
    I_N,
    I_TARGET,
    I_Z,
    I_SYNC,
) = range(15)

# Opcodes at and above ALU_END are handled by interp.py; below, by the ALU table.
ALU_END: Final = 1000
(
    OP_BRA,
    OP_EXIT,
    OP_NOP,
    OP_LD,
    OP_ST,
    OP_ATOM,
    OP_CP_ASYNC,
    OP_SHFL,
    OP_VOTE,
    OP_MATCH,
    OP_ELECT,
    OP_REDUX,
    OP_ACTIVEMASK,
    OP_SYNCWARP,
    OP_BAR,
    OP_CLUSTER_ARRIVE,
    OP_CLUSTER_WAIT,
    OP_MBAR_INIT,
    OP_MBAR_INVAL,
    OP_MBAR_ARRIVE,
    OP_MBAR_EXPECT,
    OP_MBAR_WAIT,
    OP_LDMATRIX,
    OP_STMATRIX,
    OP_CLOCK,
    OP_NANOSLEEP,
    OP_PY,
    OP_TRAP,
    OP_BRX,
    OP_MAPA,
    OP_CVTA,
    OP_ISSPACE,
    OP_MOVMATRIX,
    OP_FENCE,
    OP_CPA,
) = range(ALU_END, ALU_END + 35)

# Warp state.
(
    W_STATE,
    W_PC,
    W_MASK,
    W_NG,
    W_ALIVE,
    W_CTA,
    W_INDEX,
    W_SLEEP,
    W_SLEEP_EV,
    W_FAULT,
    W_FAULT_ADDR,
    W_FAULT_LANE,
    W_FAULT_AUX,
    W_REGS,
    W_LOCAL,
    W_LOCAL_BYTES,
    W_COUNT,
    W_GUARD,
    W_POLL_PC,
    W_POLL_HASH,
    W_POLL_EV,
    W_AGENT,
    W_GLOBAL_INDEX,
    W_WAIT_KIND,
    W_WAIT_ADDR,
    W_WAIT_SIZE,
    W_WAIT_MASK,
    W_WAIT_VALUE,
    W_WAIT_PC,
    W_CPA_COUNT,
    W_CPA_COMMITS,
    W_FENCE_SCOPE,
) = range(32)
W_FOREIGN: Final = 176  # a relaxed read since the start has met a release of another CTA
W_LOOSE: Final = 177  # the warp has waited with relaxed order since an mbarrier phase has ended
W_MISS_HOST: Final = 178  # the warp's last wait failed at this mbarrier,
W_MISS_PARITY: Final = 179  # with this parity,
W_MISS_PHASE: Final = 180  # when it had completed so many phases
W_CPA_RING: Final = 184  # operation count at each of the last 8 cp.async commits
W_GPC: Final = 32  # other groups of a diverged warp: their pc,
W_GMASK: Final = 64  # lanes,
W_GBLK: Final = 96  # and whether they wait
W_BARGEN: Final = 128  # per lane: named barrier generation waited for, plus one
W_CLGEN: Final = 192  # per lane: cluster barrier generation at arrival, plus one
WARP_WORDS: Final = 224

STATE_EMPTY, STATE_RUN, STATE_DONE = range(3)
# A sleeping warp wakes when (word at W_WAIT_ADDR & W_WAIT_MASK) differs from W_WAIT_VALUE.
SLEEP_NO, SLEEP_WORD, SLEEP_EVENT = range(3)
WAIT_MBAR, WAIT_BAR, WAIT_CLUSTER, WAIT_POLL, WAIT_PY, WAIT_CONVERGE = range(1, 7)

# Results of run_warp.
R_QUANTUM, R_BLOCKED, R_EXIT, R_PY, R_FAULT, R_IDLE, R_CTA_DONE, R_PAUSE = range(8)

# CTA state.
(
    C_CLUSTER,
    C_RANK,
    C_SMEM,
    C_SMEM_SIZE,
    C_THREADS,
    C_ALIVE,
    C_FIRST_WARP,
    C_NUM_WARPS,
    C_SHADOW,
    C_INDEX,
) = range(10)
C_BAR: Final = 16  # 16 named barriers of 4 words: arrived, expected, generation, reduction
CTA_WORDS: Final = 96

# Cluster state.
L_SIZE, L_ARRIVED, L_GEN, L_ALIVE, L_ID = range(5)
L_PHASES: Final = 5  # an mbarrier of the cluster has completed a phase
L_RELAXED: Final = 6  # a thread has arrived at the cluster barrier with relaxed order
L_LOOSE: Final = 7  # both were so when the barrier was last completed
L_SMEM: Final = 8  # shared memory base per rank
L_SHADOW: Final = 24
L_CTA: Final = 40
CLUSTER_WORDS: Final = 64

# Machine state.
(
    X_CODE,
    X_EXT,
    X_EV_SYNC,
    X_EV_MEM,
    X_CHECK,
    X_RANGES,
    X_NRANGES,
    X_CLOCK,
    X_RNG,
    X_QUANTUM,
    X_NWARPS,
    X_WARPS,
    X_SCRATCH,
    X_CURSOR,
    X_CURRENT,
    X_ADVERSARIAL,
    X_LIVE,
    X_STEPS,
    X_LAST_RANGE,
    X_ORDER,
    X_VC,
    X_NAGENTS,
    X_GSHADOW,
    X_GSHADOW_MASK,
    X_REPORTS,
    X_NREPORTS,
    X_OBJECTS,
    X_OBJECT_MASK,
    X_COVER,
    X_ALU,
    X_STEP_MEMORY,
    X_STEP_SYNC,
    X_OWNERS,
    X_GPU,
    X_RANGE_GPUS,
    X_LATE,
    X_RANGE_NUMBERS,
    X_TRACE,
    X_SMEM,
    X_SMEM_END,
    X_CROWDED,
    X_WRITTEN,
) = range(42)
MACHINE_WORDS: Final = 64

# Stores to another GPU's memory that it does not see yet: their count, then per store its address,
# bytes, value (of a block, where its bytes are), operation and epoch.
LATE_STORES: Final = 1024
LATE_WORDS: Final = 5

# Address windows.  Host addresses stay below 2**56, so these never collide.
SHARED_BASE: Final = 1 << 56
LOCAL_BASE: Final = 2 << 56
RANK_SHIFT: Final = 24

SP_GENERIC, SP_GLOBAL, SP_SHARED, SP_LOCAL, SP_RAW = range(5)

# Faults.
F_OOB_SHARED: Final = 1
F_OOB_GLOBAL: Final = 2
F_MISALIGNED: Final = 3
F_BAD_SPACE: Final = 4
F_MBAR_BAD: Final = 5
F_TRAP: Final = 6
F_CONVERGENCE: Final = 7
F_BARRIER: Final = 8
F_OOB_LOCAL: Final = 9
F_MBAR_OVERFLOW: Final = 10
F_NULL: Final = 11
F_UNINIT: Final = 12
F_RACE: Final = 13
F_PROXY: Final = 14
F_EXITED: Final = 15
F_SCOPE: Final = 16
F_CLUSTER: Final = 17
F_REPLY: Final = 18
F_MAP: Final = 19
F_EARLY: Final = 20
F_MISSED: Final = 21
F_MBAR_COUNT: Final = 22
F_UNWRITTEN: Final = 23

FAULT_TEXT: Final = {
    F_OOB_SHARED: "shared memory access out of bounds",
    F_OOB_GLOBAL: "global memory access outside every registered tensor",
    F_MISALIGNED: "misaligned access",
    F_BAD_SPACE: "address of the wrong state space",
    F_MBAR_BAD: "operation on memory that holds no initialised mbarrier",
    F_TRAP: "trap executed",
    F_CONVERGENCE: "a warp-wide instruction was reached without all lanes of its mask",
    F_BARRIER: "named barrier misuse",
    F_OOB_LOCAL: "local memory access out of bounds",
    F_MBAR_OVERFLOW: "more arrivals at an mbarrier than its phase expects",
    F_NULL: "access to a null address",
    F_UNINIT: "read of shared memory that nothing has written",
    F_UNWRITTEN: "read of global memory that nothing has written",
    F_RACE: "data race",
    F_EXITED: "access to the shared memory of a CTA that has exited",
    F_SCOPE: "an ordered access to another GPU's memory needs scope sys",
    F_CLUSTER: "cluster barrier misuse: every wait follows one arrival of the thread",
    F_REPLY: "a launch query's reply over what a warp has read, without fence.proxy.async between",
    F_MAP: "use of an edited tensor map without a release of the edit to the tensor map proxy and an "
    "acquire by this CTA after it",
    F_EARLY: "an arrival or bytes at an mbarrier that nothing orders after the end of its previous phase: "
    "they may count for that one",
    F_MISSED: "an mbarrier completed the phase that a warp waits for, and the next one, before it looked",
    F_MBAR_COUNT: "an mbarrier expects 1 to 2^20 - 1 arrivals, and at most as many bytes either way",
    F_PROXY: "asynchronous read of generic writes without fence.proxy.async between",
}

# mbarrier word: pending arrivals (20 bits), expected (20), transaction count (22, biased), phase,
# and a tag bit that says "initialised".
MB_PHASE: Final = 1 << 62
MB_TX_BIAS: Final = 1 << 20
MB_TX_LIMIT: Final = (1 << 20) - 1  # also the most arrivals that one expects

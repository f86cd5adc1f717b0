"""``mok bench``: this layer and its peers timed in one run, in the steady regime.

shapes.py      what is measured: shapes, suites, the targets set for them
work.py        the inputs that every program gets
programs/      one adapter per program, all with the interface of ``programs.base.Program``
bits.py        whether two results have the same bits
oracle.py      each program's output and gradients against FP32
timing.py      warm-up, back-to-back windows, medians
telemetry.py   clock and power while a window runs
runner.py      interleaved rounds over shapes, programs and passes, within a time budget
results.py     rows, ratios, geometric means, comparison with an earlier run
ceiling.py     the time that padding, token sum and schedule alone would take
tables.py, charts.py   the same for people
sweep.py       one tunable over a range of values
"""

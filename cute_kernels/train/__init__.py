"""Training a small language model of bytes with hyper-connections: ``python -m cute_kernels train``.

options.py       what a run is
loop.py          its steps, and what they leave in its folder
model.py         the transformer, the optimizer, one step; sharding
data.py          the text
checkpoint.py    checkpoints that are whole or not there
distributed.py   the ranks
log.py           lines of JSON, the plot
command.py       the command line
"""

"""The memory-layout study: what the layout of the heads does to attention on this machine.

    cases.py        the shapes, their operations and bytes: one list for the study and for benches/
    questions.py    the questions, a module each: heads.py …
    runner.py       operands as a fused projection writes them, the arms, interleaved timing, results as JSON
    plots.py        the picture
    __main__.py     options, progress bar, table: ``fastmha study``

Cases and runner need nothing but fastmha; table and picture need rich and matplotlib: ``pip install "fastmha[study]"``.
"""

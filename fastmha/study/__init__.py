"""The memory-layout study: what the layout of heads does to attention on this machine. The command is ``fastmha study``.

    cases.py        shapes of heads and of layers, their operations and bytes: one list for the study and for benches/
    trial.py        what is measured: arms in rounds of turning order, medians, bootstrap intervals
    operands.py     heads in a layout, and attention on the same heads that lie elsewhere
    questions.py    the questions, a module each, from trials to an answer:
                    heads, strides, projections, crossover, kv_cache, textbook, counts, layers, memory
    shape.py        one shape: prediction beside measurement
    machine.py      what this machine is and what it can do at best
    pace.py         how long trials take here, what is announced, and what a limit leaves of them
    runner.py       runs trials, keeps records through interruptions, results as JSON
    folder.py       the folder of a study: one process at a time, whole files, damaged ones set aside
    answer.py       a question, and its answer as data: sentences, tables, pictures
    words.py        numbers in sentences and tables, and the sentence with which a command fails
    report.py       answers for the terminal, as Markdown and as one HTML file
    plots.py        the pictures

Measuring needs nothing but fastmha; tables and pictures need rich and matplotlib: ``pip install "fastmha[study]"``.
"""

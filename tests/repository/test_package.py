"""The package as a whole: instruction sets, its public face, its documentation, what it imports and what it says."""

import ast
import doctest
import importlib
import importlib.metadata
import importlib.resources
import inspect
import itertools
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import scipy
from support import VECTOR_BYTES

import fastmha
import fastmha.parallel
from fastmha import _core

RUNNABLE = _core.runnable_isas()


def python(code, cwd, *options, **environment):
    """A Python of its own on the code."""
    inherited = {name: value for name, value in os.environ.items() if name != "FASTMHA_ISA"}
    return subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", textwrap.dedent(code)], cwd=cwd, env=inherited | environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- instruction sets

ISA_REPORT = """
    import numpy as np, fastmha
    x = np.random.default_rng(0).standard_normal((1, 2, 19, 8))
    print(*fastmha._core.selected_isa(), fastmha.plan(x, x, x).isa)
    out = fastmha.attention(x, x, x, is_causal=True)
    print(np.abs(out - fastmha.reference.attention(x, x, x, is_causal=True)).max() < 1e-14)
"""


@pytest.mark.parametrize("isa", RUNNABLE)
def test_the_instruction_set_that_is_forced_is_the_one_that_runs(isa, tmp_path):
    """The name comes out of the table of the kernels themselves."""
    ran = python(ISA_REPORT, tmp_path, FASTMHA_ISA=isa)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{isa} {VECTOR_BYTES[isa]} {isa}\nTrue\n"


@pytest.mark.parametrize("environment", [{}, {"FASTMHA_ISA": ""}], ids=["unset", "empty"])
def test_the_best_instruction_set_runs_by_default(environment, tmp_path):
    ran = python(ISA_REPORT, tmp_path, **environment)
    best = [name for name in RUNNABLE if name != "amx-emulated"][-1]        # which is for tests alone
    assert ran.stdout.startswith(f"{best} "), ran.stderr


def test_the_baseline_runs_everywhere():
    assert RUNNABLE[0] == "baseline"
    assert set(RUNNABLE) <= set(VECTOR_BYTES)


@pytest.mark.parametrize("name", ["sse9", "AVX2", "auto"])
def test_an_unknown_instruction_set_is_an_import_error_with_the_choices(name, tmp_path):
    ran = python("import fastmha", tmp_path, FASTMHA_ISA=name)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: FASTMHA_ISA must be one of {', '.join(RUNNABLE)} on this machine, got {name!r}"


def test_selecting_an_unknown_instruction_set_changes_nothing():
    before = _core.selected_isa()
    with pytest.raises(ValueError, match="instruction set 'sse9' does not run here"):
        _core.select_isa("sse9")
    assert _core.selected_isa() == before


# -------------------------------------------------------------------------------------------------------- the report


def test_show_config_prints_what_a_bug_report_needs(capsys):
    fastmha.show_config()
    text = capsys.readouterr().out
    isa, width = _core.selected_isa()
    for part in (
        fastmha.__version__, _core.__file__, platform.python_version(), np.__version__, scipy.__version__,
        fastmha.tuning.cpu_name(), platform.machine(), f"{isa} ({8 * width}-bit vectors)", ", ".join(RUNNABLE), "BLAS",
        fastmha.threads.bind_blas() or "no setter found", f"{fastmha.get_num_threads()} per call",
    ):  # fmt: skip
        assert part in text
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "fastmha", "Python", "NumPy", "SciPy", "CPU", "kernels", "tiles", "tuning", "BLAS", "threads",
    ]  # fmt: skip


def test_show_config_names_the_forced_instruction_set(tmp_path):
    ran = python("import fastmha; fastmha.show_config()", tmp_path, FASTMHA_ISA="baseline")
    assert "kernels: baseline (128-bit vectors)" in ran.stdout, ran.stderr


@pytest.mark.parametrize("variable", ["FASTMHA_NUM_THREADS", "FASTMHA_PRECISION", "FASTMHA_TUNING"])
def test_the_command_config_says_in_a_line_what_is_wrong_with_a_variable(variable, tmp_path):
    code = """
        from fastmha.__main__ import main
        main(["config"])
    """
    ran = python(code, tmp_path, **{variable: "/x"})
    assert ran.returncode == 2
    assert re.search(rf"^fastmha: error: {variable}.*/x", ran.stderr, re.MULTILINE), ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_command_config_needs_nothing_of_the_study(tmp_path):
    code = """
        import sys
        from fastmha.__main__ import main
        main(["config"])
        print([name for name in sys.modules if name.startswith("fastmha.study")])
    """
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_plan_is_the_function_and_no_module(tmp_path):
    assert inspect.isfunction(fastmha.plan)
    assert python("import fastmha.plan", tmp_path).returncode == 1


def test_version_is_that_of_the_metadata():
    assert fastmha.__version__ == importlib.metadata.version("fastmha")


def test_type_information_is_marked_and_shipped():
    files = importlib.resources.files("fastmha")
    assert (files / "py.typed").is_file()


# ---------------------------------------------------------------------------------------------- without compiled core


def test_a_source_tree_without_compiled_core_says_what_to_do(tmp_path):
    source = Path(fastmha.__file__).parent
    for path in source.rglob("*.py"):
        target = tmp_path / "fastmha" / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    # -S: an editable installation would find its own core for this package, too
    places = [tmp_path, Path(np.__file__).parents[1], Path(scipy.__file__).parents[1]]
    ran = python("import fastmha", tmp_path, "-S", PYTHONPATH=os.pathsep.join(map(str, places)))
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(tmp_path / "fastmha") in last
    assert "no compiled core" in last
    assert "pip install" in last


# ---------------------------------------------------------------------------------------------------- dependencies


def test_import_needs_nothing_but_numpy_and_scipy(tmp_path):
    code = """
        import sys
        import numpy
        import scipy.linalg.cython_blas
        before = set(sys.modules)
        import fastmha
        new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        print(sorted(name for name in new if "cython" not in name))     # Cython's runtime is part of the compiled core
        print([name for name in sys.modules if name.startswith("fastmha.study")])
    """
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    names, study = map(ast.literal_eval, ran.stdout.splitlines())
    assert set(names) <= {"fastmha", "numpy", "scipy"}
    assert study == []


def test_blas_is_imported_by_the_first_product_that_it_makes_and_by_nothing_before(tmp_path):
    code = """
        import sys
        import numpy as np
        import fastmha

        def there():
            return "scipy.linalg" in sys.modules

        before = there()
        x = np.random.default_rng(0).standard_normal((2, 4, 70, 16))
        m = fastmha.MultiHeadAttention(32, 4, rng=0)
        tokens = np.ones((2, 5, 32), np.float32)
        m.backward(m.forward(tokens))
        m.backward(m.forward(tokens, need_weights=True)[0])
        m.forward(tokens[:, :1], is_causal=True, cache=fastmha.KVCache(2, 4, 8), training=False)
        out, lse = fastmha.attention(x, x, x, algorithm="tiled", return_lse=True)
        gradients = fastmha.attention_backward(x, x, x, x, out, lse, algorithm="tiled")
        meanwhile = there()
        by_blas = fastmha.attention(x, x, x, algorithm="blas", return_lse=True)
        gradients_by_blas = fastmha.attention_backward(x, x, x, x, *by_blas, algorithm="blas")
        for ours, theirs in zip((out, *gradients), (by_blas[0], *gradients_by_blas)):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        print(before, meanwhile, there())
    """
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[0] == "False"
    assert ran.stdout.split()[1] == "False" or not fastmha._core.fused_multiply_add()    # else "auto" may be BLAS's
    assert ran.stdout.split()[2] == "True"


@pytest.mark.parametrize("call", ["fastmha.attention(x, x, x, algorithm='blas')",
                                  "fastmha.attention_backward(x, x, x, x, x, np.zeros((2, 4, 70)), algorithm='blas')",
                                  "fastmha._core.matmul(y, y, z, False, True, 1.0, 0.0, None, (70, 70), 2)"])
def test_whatever_needs_blas_first_gets_it_on_many_threads_at_a_time(tmp_path, call):
    code = f"""
        import threading
        import numpy as np
        import fastmha
        from fastmha import _core
        assert not _core.blas_threads_bound()
        x, y, z = np.ones((2, 4, 70, 16)), np.ones((70, 16)), np.zeros((70, 70))
        gate, failed = threading.Barrier(8), []
        def work():
            gate.wait()
            try:
                {call}
            except BaseException as error:
                failed.append(error)
        many = [threading.Thread(target=work) for _ in range(8)]
        for one in many: one.start()
        for one in many: one.join()
        assert not failed, failed
        assert _core.blas_threads_bound() == (fastmha.threads.bind_blas() is not None)
    """
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_the_declared_dependencies_are_numpy_and_scipy():
    required = importlib.metadata.requires("fastmha")
    assert {re.match(r"[\w-]+", r)[0] for r in required if "extra" not in r} == {"numpy", "scipy"}


# -------------------------------------------------------------------------------------------------------- public names

SIZES = "batch_size seq_len d_model n_heads"
MASKING = "mask is_causal offset key_padding_lengths key_ranges window"
FUNCTIONS = {
    "attention": f"q k v * layout {MASKING} scale softcap algorithm return_lse out capture num_threads",
    "attention_backward": f"grad_out q k v out lse * layout {MASKING} scale softcap algorithm num_threads",
    "plan": f"q k v * layout {MASKING} scale softcap algorithm return_lse capture num_threads backward",
    "merge": "out1 lse1 out2 lse2 * layout",
    "Capture": "heads rows reduce",
    "softmax": "x",
    "softmax_backward": "grad_output softmax_output",
    "gelu": "x * approximate out num_threads",
    "gelu_backward": "grad_output x * approximate num_threads",
    "silu": "x * out num_threads",
    "silu_backward": "grad_output x * num_threads",
    "layer_norm": "x weight bias eps residual * out num_threads",
    "layer_norm_backward": "grad_output x weight bias eps residual * num_threads",
    "rms_norm": "x weight eps * residual out num_threads",
    "rms_norm_backward": "grad_output x weight eps * residual num_threads",
    "scaled_dot_product_attention": "Q K V mask",
    "multi_head_attention_core": "Q K V num_heads mask",
    "multi_head_attention": "q k v num_heads weights mask",
    "split_heads": "x num_heads",
    "combine_heads": "x",
    "create_causal_mask": "seq_len_q seq_len_k * offset dtype",
    "create_padding_mask": "lengths max_len",
    "create_attention_mask": "seq_len_q seq_len_k is_causal key_padding_lengths",
    "create_causal_mask_with_cache": "seq_len_q seq_len_k cache_len",
    "set_num_threads": "num_threads",
    "get_num_threads": "",
    "show_config": "",
    "MultiHeadAttention": "d_model num_heads * num_kv_heads use_bias dtype layout algorithm rng",
    "MultiHeadAttention.forward": (
        "self X mask * context is_causal offset key_padding_lengths key_ranges window softcap cache need_weights training "
        "num_threads transform_qk"
    ),
    "MultiHeadAttention.backward": "self grad_output",
    "MultiHeadAttention.project_context": "self C * num_threads",
    "mean_pool_kv_heads": "module num_kv_heads",
    "KVCache": "batch_size num_kv_heads head_dim * v_head_dim capacity dtype window max_chunk",
    "KVCache.append": "self k v lengths",
    "KVCache.truncate": "self length",
    "KVCache.reorder": "self indices",
    "KVCache.reset": "self",
    "KVCache.attend": (
        "self q * lengths_new mask is_causal key_ranges window scale softcap algorithm return_lse need_weights num_threads"
    ),
    "SelfAttention": "d_model d_k d_v d_out * use_bias dtype rng",
    "SelfAttention.forward": "self X mask * is_causal key_padding_lengths key_ranges need_weights training",
    "SelfAttention.backward": "self grad_output",
    "analysis.count_flops": f"{SIZES} * n_kv_heads d_k d_v seq_len_k is_causal window backward",
    "analysis.count_memory_bytes": f"{SIZES} dtype * n_kv_heads d_k d_v algorithm backward",
    "analysis.arithmetic_intensity": f"{SIZES} dtype *",
    "analysis.kv_cache_bytes": "batch_size seq_len n_kv_heads head_dim n_layers dtype",
    "analysis.crossover_length": "d_model",
    "reference.error_bounds": f"q k v grad_out dtype * layout {MASKING} scale softcap algorithm",
    "reference.product_error_bounds": "a b dtype",
}
PARAMETERS = [kind + letter for kind in ("W_", "b_") for letter in "QKVO"]
MODULE_ATTRIBUTES = [
    "forward", "backward", "parameters", "gradients", "state_dict", "load_state_dict", "freeze", "unfreeze",
    "intermediates", "num_parameters", *PARAMETERS, *("grad_" + name for name in PARAMETERS),
]  # fmt: skip


@pytest.mark.parametrize("path", FUNCTIONS)
def test_public_functions_take_their_arguments_in_this_order(path):
    """Positional ones exactly in order, from the first; those behind "*" by keyword only. More keywords may come."""
    positional, _, keywords = FUNCTIONS[path].partition("*")
    parameters = inspect.signature(attrgetter(path)(fastmha)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == positional.split()
    assert set(keywords.split()) <= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


DEFAULTS = {
    "attention": {
        "layout": "BHLD", "mask": None, "is_causal": False, "offset": None, "key_padding_lengths": None, "key_ranges": None,
        "window": None, "scale": None, "softcap": None, "algorithm": "auto", "return_lse": False, "out": None, "capture": None,
        "num_threads": None,
    },
    "Capture": {"heads": None, "rows": None, "reduce": None},
    "attention_backward": {"layout": "BHLD", "mask": None, "is_causal": False, "scale": None, "algorithm": "auto"},
    "MultiHeadAttention": {
        "num_kv_heads": None, "use_bias": False, "dtype": np.float32, "layout": "auto", "algorithm": "auto",
        "rng": None,
    },
    "MultiHeadAttention.forward": {
        "mask": None, "context": None, "is_causal": False, "offset": None, "key_padding_lengths": None,
        "key_ranges": None, "window": None, "softcap": None, "cache": None, "need_weights": False, "training": True,
        "num_threads": None, "transform_qk": None,
    },
    "KVCache": {"v_head_dim": None, "capacity": None, "dtype": np.float32, "window": None, "max_chunk": None},
    "KVCache.append": {"lengths": None},
    "SelfAttention": {"d_out": None, "use_bias": True, "dtype": np.float32, "rng": None},
    "create_causal_mask": {"seq_len_k": None, "offset": 0, "dtype": bool},
    "create_attention_mask": {"seq_len_k": None, "is_causal": True, "key_padding_lengths": None},
}  # fmt: skip


@pytest.mark.parametrize("path", DEFAULTS)
def test_defaults_of_public_functions(path):
    parameters = inspect.signature(attrgetter(path)(fastmha)).parameters
    assert {name: parameters[name].default for name in DEFAULTS[path]} == DEFAULTS[path]


def test_public_names_are_listed_and_exist():
    listed = set(fastmha.__all__)
    assert {path.split(".")[0] for path in FUNCTIONS} | {"Plan", "reference"} <= listed
    assert sorted(listed) == sorted(fastmha.__all__)  # each once
    for name in listed:
        assert hasattr(fastmha, name)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "SelfAttention"])
def test_modules_have_their_attributes(name):
    sizes = {"MultiHeadAttention": (8, 2), "SelfAttention": (8, 2, 2)}[name]
    m = getattr(fastmha, name)(*sizes)
    for attribute in MODULE_ATTRIBUTES:
        assert hasattr(m, attribute)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if hasattr(fastmha.reference, n)])
def test_the_reference_has_the_same_positional_arguments(name):
    positional = FUNCTIONS[name].partition("*")[0].split()
    parameters = inspect.signature(getattr(fastmha.reference, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == positional


# -------------------------------------------------------------------------------------------------------- documentation

NOT_HERE = ("fastmha._core", "fastmha.__main__", "fastmha.parallel", "fastmha.study")  # compiled; folders; what needs extras
FOUND = [module.name for module in pkgutil.iter_modules(fastmha.__path__, "fastmha.")]
MODULES = ["fastmha", *(name for name in FOUND if name not in NOT_HERE)]
PARALLEL = [module.name for module in pkgutil.iter_modules(fastmha.parallel.__path__, "fastmha.parallel.")]
OF_OTHERS = {f"fastmha.{name}": name for name in ("torch", "transformers", "jax")}      # their extras bring what they stand on


@pytest.mark.parametrize("name", [*MODULES, "fastmha.parallel", *PARALLEL])
def test_every_module_says_what_it_is_and_its_examples_run(name):
    if name in OF_OTHERS:
        pytest.importorskip(OF_OTHERS[name], reason=f'needs {OF_OTHERS[name]}: pip install "fastmha[{OF_OTHERS[name]}]"')
    if name == "fastmha.multihead" and not _core.fused_multiply_add():
        pytest.skip("its examples are of kernels with fused multiply-add")
    module = importlib.import_module(name)
    assert len(module.__doc__.strip().splitlines()[0]) > 20
    assert doctest.testmod(module).failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder()
    for name in ("functional", "multihead", "selfattention", "masks", "cache"):
        tests = finder.find(importlib.import_module(f"fastmha.{name}"))
        assert sum(len(test.examples) for test in tests) > 0, name


def sections(docstring):
    """The headings of a numpydoc docstring: lines underlined with dashes."""
    pairs = itertools.pairwise(inspect.cleandoc(docstring).splitlines())
    return {a for a, b in pairs if re.fullmatch("-{3,}", b) and len(a) == len(b)}


REFERS = {"plan": "`attention`", "analysis.arithmetic_intensity": "`count_flops`"}  # where the arguments are explained


@pytest.mark.parametrize("path", FUNCTIONS)
def test_public_functions_have_numpydoc_docstrings(path):
    found = attrgetter(path)(fastmha)
    doc, signature = inspect.getdoc(found), inspect.signature(found)
    if path in REFERS:
        assert REFERS[path] in doc
        return
    names = {name for name in signature.parameters if name != "self"}
    if names:
        assert "Parameters" in sections(doc)
        assert names <= set(re.findall(r"\w+", doc))
    if not inspect.isclass(found) and signature.return_annotation not in (None, "None"):
        assert "Returns" in sections(doc)


@pytest.mark.parametrize("owner", ["MultiHeadAttention", "SelfAttention", "KVCache", "Plan"])
def test_public_methods_have_docstrings(owner):
    for name, member in inspect.getmembers(getattr(fastmha, owner)):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), name


def test_the_map_names_every_file():
    """The picture in the package's docstring is of the files that there are."""
    for name in (module.split(".")[1] for module in MODULES[1:]):
        is_file = Path(fastmha.__file__).with_name(f"{name}.py").exists()
        assert (f"{name}.py" if is_file else f"{name}/") in fastmha.__doc__
    for name in re.findall(r"(\w+)\.py\b", fastmha.__doc__):
        assert f"fastmha.{name}" in MODULES
    found = re.findall(r"(\w+)\.py\b", fastmha.parallel.__doc__)
    assert sorted(f"fastmha.parallel.{name}" for name in found) == sorted(PARALLEL)
    files = {file.stem for file in Path(fastmha.reference.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(re.findall(r"(\w+)\.py\b", fastmha.reference.__doc__)) == files
    for folder in ("parallel", "reference", "study"):
        assert f"{folder}/" in fastmha.__doc__


def test_files_import_only_what_stands_below_them_in_the_map():
    picture = fastmha.__doc__.partition("Every file may read those below it")[0]
    order = list(dict.fromkeys(re.findall(r"(\w+)\.py\b", picture)))
    assert len(order) > 10
    for i, name in enumerate(order):
        tree = ast.parse(Path(fastmha.__file__).with_name(f"{name}.py").read_text("utf-8"))
        read = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "fastmha":
                read |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module.startswith("fastmha."):
                read.add(node.module.split(".")[1])
        assert read <= {"_core", *order[i + 1 :]}, name

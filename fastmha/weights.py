"""Weights of attention modules from files and into files, under the names that other libraries gave them.

`load` looks at names, shapes and types of all that it needs before it reads anything, and changes the module at the end, as a
whole. ``.safetensors`` files need the extra ``weights``: ``pip install "fastmha[weights]"``.
"""
from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fastmha import validate
from fastmha.module import AttentionModule

_Module = TypeVar("_Module", bound=AttentionModule)


class _Tensor(NamedTuple):
    """Of a file: which parameters it holds, side by side along its axis of outputs."""

    parameters: tuple[str, ...]
    turned: bool = True         # stored (out, in), as torch.nn.Linear does; parameters are (in, out)


_QKV, _B_QKV = ("W_Q", "W_K", "W_V"), ("b_Q", "b_K", "b_V")
_TORCH_OUT = {"out_proj.weight": _Tensor(("W_O",)), "out_proj.bias": _Tensor(("b_O",))}
_TORCH_IN = {"in_proj_bias": _Tensor(_B_QKV), **_TORCH_OUT}


def _linears(**names: str) -> Mapping[str, _Tensor]:
    """Four modules like torch.nn.Linear, by the letters of their parameters."""
    return {f"{name}.{kind}": _Tensor((f"{letter}_{which}",))
            for which, name in names.items() for kind, letter in (("weight", "W"), ("bias", "b"))}


# Each layout has one or more forms; the first whose weights are all there is the file's.
_FORMS: Mapping[str, tuple[Mapping[str, _Tensor], ...]] = MappingProxyType({
    "fastmha": ({name: _Tensor((name,), turned=False) for name in (*_QKV, "W_O", *_B_QKV, "b_O")},),
    "torch": ({"in_proj_weight": _Tensor(_QKV), **_TORCH_IN},
              {**{f"{letter.lower()}_proj_weight": _Tensor((f"W_{letter}",)) for letter in "QKV"}, **_TORCH_IN}),
    "bert": (_linears(Q="self.query", K="self.key", V="self.value", O="output.dense"),),
    "gpt2": ({"c_attn.weight": _Tensor(_QKV, turned=False), "c_attn.bias": _Tensor(_B_QKV, turned=False),
              "c_proj.weight": _Tensor(("W_O",), turned=False), "c_proj.bias": _Tensor(("b_O",), turned=False)},),
    "llama": (_linears(Q="q_proj", K="k_proj", V="v_proj", O="o_proj"),),
})
LAYOUTS = tuple(_FORMS)
# What stands beside attention's own tensors and is none of them: constants, and the norm that follows it.
_BESIDE = frozenset({"bias", "masked_bias", "rotary_emb.inv_freq", "output.LayerNorm.weight", "output.LayerNorm.bias"})
_REFUSED = {
    "bias_k": "a learned key that every sequence gets: the module has none",
    "bias_v": "a learned value that every sequence gets: the module has none",
    **{f"{x}_norm.weight": f"a norm of {what}, which forward's transform_qk would have to compute"
       for x, what in (("q", "queries"), ("k", "keys"))},
    "sinks": "which forward takes as sinks, not the module",
}


def load(file_or_mapping: Any, module: _Module, prefix: str = "", layout: str | None = None) -> _Module:
    """Copy the weights of one attention layer into a module.

    Parameters
    ----------
    file_or_mapping : path or mapping
        A ``.safetensors`` or ``.npz`` file, or what maps names to arrays: a ``state_dict`` of torch, too. Of files only what is
        needed is read; nothing in them is executed.
    module : MultiHeadAttention
        Not frozen; of the sizes in the file. float16 and bfloat16 are widened, other types rounded to the module's.
    prefix : str
        What stands before the layer's names, such as ``"encoder.layer.0.attention"``.
    layout : {"torch", "bert", "gpt2", "llama", "fastmha"}, optional
        Whose names they are; by default told from them. "torch": `torch.nn.MultiheadAttention`, its weights in one or apart.
        "bert": BERT and what has its names. "gpt2": Conv1D, weights (in, out). "llama": also Mistral, Qwen2 and Gemma.

    Returns
    -------
    module

    Raises
    ------
    ValueError, TypeError
        Naming the file, the tensor and what is wrong with it: missing, unknown, of another shape, no floats, truncated, damaged.
        The module is then as it was.
    OSError
        If the file cannot be opened.

    Examples
    --------
    >>> import numpy as np, fastmha, fastmha.weights
    >>> m = fastmha.MultiHeadAttention(8, 2, rng=0)
    >>> state = {"in_proj_weight": np.ones((24, 8), np.float32), "out_proj.weight": np.zeros((8, 8), np.float32)}
    >>> fastmha.weights.load(state, m).W_K.sum()
    np.float32(64.0)
    """
    if not isinstance(module, AttentionModule):
        raise TypeError(f"module must be a MultiHeadAttention, got {type(module).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    if layout is not None:
        validate.choice("layout", layout, LAYOUTS)
    start = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    with _opened(file_or_mapping) as source:
        names = {name[len(start):] for name in source.names if name.startswith(start)}
        form = _form(source, names, start, layout)
        shapes = {name: p.shape for name, p in module.parameters().items()}
        wanted = {name: tensor for name, tensor in form.items() if tensor.parameters[0] in shapes}
        for name, reason in _REFUSED.items():
            if name in names:
                raise ValueError(f"{source.name} holds {start}{name}, {reason}")
        for name in sorted(names - wanted.keys() - _BESIDE):
            if name in form:
                raise ValueError(f"{source.name} holds {start}{name}, but the module has no {form[name].parameters[0]}: "
                                 "use_bias says which biases there are")
            raise ValueError(f"{source.name} holds {start}{name}, which is no part of attention: prefix and layout say what to read")
        for name, tensor in wanted.items():
            if name not in names:
                raise ValueError(f"{source.name} has no {start}{name}, which holds {', '.join(tensor.parameters)}")
            found, expected = source.shape(start + name), _stored_shape(tensor, shapes)
            if found != expected:
                raise ValueError(f"{start}{name} in {source.name} must have shape {expected} for {', '.join(tensor.parameters)} of the "
                                 f"module, got {found}")
        state: dict[str, np.ndarray] = {}
        for name, tensor in wanted.items():
            array = source.read(start + name)
            array = array.T if tensor.turned else array
            ends = np.cumsum([shapes[p][-1] for p in tensor.parameters])[:-1]
            state.update(zip(tensor.parameters, np.split(array, ends, axis=-1), strict=True))
        module.load_state_dict(state)
    return module


def save(module: AttentionModule, file: Any, layout: str = "fastmha", prefix: str = "") -> None:
    """Write a module's weights to a file, which appears as a whole or not at all.

    Parameters
    ----------
    module : MultiHeadAttention
    file : path
        Its name ends in ``.safetensors`` or ``.npz``. What is there is replaced.
    layout : {"torch", "bert", "gpt2", "llama", "fastmha"}
        Whose names to write, as in `load`.
    prefix : str
        What to write before them.

    Raises
    ------
    ValueError, TypeError
        For another ending, and for a module that the layout has no names for: "torch", "bert" and "gpt2" know neither fewer
        key/value heads nor heads of a width of their own.
    """
    if not isinstance(module, AttentionModule):
        raise TypeError(f"module must be a MultiHeadAttention, got {type(module).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    validate.choice("layout", layout, LAYOUTS)
    path = Path(file)
    if path.suffix not in _WRITERS:
        raise ValueError(f"file must end in .safetensors or .npz, got {path.name!r}")
    start = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    parameters = module.parameters()
    form = next((form for form in _FORMS[layout] if _writable(layout, form, parameters, module.d_model)), None)
    if form is None:
        raise ValueError(f'layout "{layout}" has no names for a module with weights '
                         f"{', '.join(f'{name} {p.shape}' for name, p in parameters.items())}")
    tensors = {}
    for name, tensor in form.items():
        if tensor.parameters[0] in parameters:
            array = np.concatenate([parameters[p] for p in tensor.parameters], axis=-1)
            tensors[start + name] = np.ascontiguousarray(array.T if tensor.turned else array)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        _WRITERS[path.suffix](tensors, temporary)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _writable(layout: str, form: Mapping[str, _Tensor], parameters: Mapping[str, np.ndarray], d_model: int) -> bool:
    """Whether who knows this form would read from it what these parameters are."""
    rows = {name: p.shape[0] for name, p in parameters.items() if name in _QKV}
    if any(len({rows[p] for p in tensor.parameters if p in rows}) > 1 for tensor in form.values()):
        return False
    if layout not in ("torch", "bert", "gpt2"):
        return True
    if layout != "torch" and any(n != d_model for n in rows.values()):
        return False
    return (all(p.shape[-1] == d_model for p in parameters.values())
            and sum(name.startswith("b") for name in parameters) in ((0, 4) if layout == "torch" else (4,)))


# -------------------------------------------------------------------------------------------------------------- names

def _form(source: _Source, names: set[str], start: str, layout: str | None) -> Mapping[str, _Tensor]:
    """The form of the layout that was named, or of the one whose weights are there."""
    found = [form for key in ((layout,) if layout else LAYOUTS) for form in _FORMS[key] if _weights(form) <= names]
    if found:
        return found[0]
    what = f'the weights of layout "{layout}"' if layout else "the weights of any layout"
    begins = sorted({name[:-len(key)] for name in source.names for key in map(min, map(_weights, sum(_FORMS.values(), ())))
                     if name.endswith(f".{key}")})
    hint = f"; its attention layers begin with {validate.cut(', '.join(begins))}" if begins else ""
    raise ValueError(f"{source.name} has not {what} after prefix {start!r}{hint}")


def _weights(form: Mapping[str, _Tensor]) -> set[str]:
    return {name for name, tensor in form.items() if tensor.parameters[0].startswith("W")}


def _stored_shape(tensor: _Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    of = [shapes[p] for p in tensor.parameters]
    shape = (*of[0][:-1], sum(s[-1] for s in of))
    if any(s[:-1] != of[0][:-1] for s in of):
        raise ValueError(f"{', '.join(tensor.parameters)} of the module have the shapes {', '.join(map(str, of))}: they do not fit side "
                         "by side into one tensor")
    return shape[::-1] if tensor.turned else shape


# -------------------------------------------------------------------------------------------------------------- files

class _Source(NamedTuple):
    """What tensors come from."""

    name: str                                       # in messages
    names: frozenset[str]
    shape: Callable[[str], tuple[int, ...]]         # of a tensor whose type is found to be one of floats
    read: Callable[[str], np.ndarray]               # float32 or float64, finite or not


_DAMAGE = (ValueError, TypeError, KeyError, EOFError, OverflowError, MemoryError, NotImplementedError, RuntimeError, zipfile.BadZipFile)


@contextmanager
def _opened(given: Any) -> Iterator[_Source]:
    if isinstance(given, Mapping):
        yield _of_mapping(given)
        return
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"file_or_mapping must be a path or a mapping of names to arrays, got {type(given).__name__}")
    path = Path(given)
    if path.suffix not in _READERS:
        raise ValueError(f"file_or_mapping must end in .safetensors or .npz, got {path.name!r}")
    with open(path, "rb"):      # OSError as it comes
        pass
    with _READERS[path.suffix](path) as source:
        yield source


@contextmanager
def _damage(path: Path, what: str = "it") -> Iterator[None]:
    """Whatever a library says of a damaged file, as one kind of error."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{path.name}: {what} cannot be read: {validate.cut(error) or type(error).__name__}") from error


def _of_mapping(given: Mapping[Any, Any]) -> _Source:
    strange = next((name for name in given if not isinstance(name, str)), None)
    if strange is not None:
        raise TypeError(f"file_or_mapping must map names to arrays, got the name {validate.short(strange)}")

    def array(name: str) -> np.ndarray:
        x = given[name]
        if hasattr(x, "detach"):        # a tensor, of a type that NumPy may not have
            x = x.detach().cpu()
            x = x.float() if x.element_size() < 4 else x
        return _floats(name, "the mapping", validate.as_array(name, x))

    return _Source("the mapping", frozenset(given), lambda name: array(name).shape, array)


def _floats(name: str, where: str, x: np.ndarray) -> np.ndarray:
    """x in float32 or float64."""
    if x.dtype.kind == "f" and x.dtype.itemsize <= 8:
        return x if x.dtype.itemsize > 2 else x.astype(np.float32)
    if x.dtype.name == "bfloat16":
        return x.astype(np.float32)
    raise ValueError(f"{name} in {where} must hold floats of at most 64 bits, got {x.dtype}")


@contextmanager
def _of_npz(path: Path) -> Iterator[_Source]:
    with _damage(path):
        archive = zipfile.ZipFile(path)
    with archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}

        def header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            return shape, dtype

        def shape(name: str) -> tuple[int, ...]:
            with _damage(path, name), archive.open(members[name]) as file:
                found, dtype = header(file)
            _floats(name, path.name, np.empty(0, dtype))
            return found

        def read(name: str) -> np.ndarray:
            with _damage(path, name), archive.open(members[name]) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
                if file.read(1):
                    raise ValueError("more follows than its header says")
            return _floats(name, path.name, array)

        yield _Source(path.name, frozenset(members), shape, read)


@contextmanager
def _of_safetensors(path: Path) -> Iterator[_Source]:
    open_file = _safetensors().safe_open
    with _damage(path):
        try:
            opened = open_file(path, framework="np")
        except Exception as error:      # of a class of its own, which is no subclass of what it means
            raise ValueError(str(error)) from error
    with opened as file:

        def shape(name: str) -> tuple[int, ...]:
            with _damage(path, name):
                part = file.get_slice(name)
                found, dtype = tuple(part.get_shape()), part.get_dtype()
            if dtype not in ("F64", "F32", "F16", "BF16"):
                raise ValueError(f"{name} in {path.name} must hold floats of at most 64 bits, got {dtype}")
            return found

        def read(name: str) -> np.ndarray:
            with _damage(path, name):
                if file.get_slice(name).get_dtype() == "BF16":      # which NumPy has not
                    return _bfloat16(path, name)
                return _floats(name, path.name, file.get_tensor(name))

        yield _Source(path.name, frozenset(file.keys()), shape, read)


def _bfloat16(path: Path, name: str) -> np.ndarray:
    """A tensor of a file that safetensors has found to be whole: 8 bytes of length, so much JSON, the tensors."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        said = json.loads(file.read(length))[name]
    first, last = said["data_offsets"]
    halves = np.memmap(path, "<u2", "r", 8 + length + first, ((last - first) // 2,))
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(said["shape"])


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError('.safetensors files need safetensors: pip install "fastmha[weights]"') from error
    return safetensors


def _write_npz(tensors: Mapping[str, np.ndarray], path: str) -> None:
    with open(path, "wb") as file:
        np.savez(file, **tensors)


def _write_safetensors(tensors: dict[str, np.ndarray], path: str) -> None:
    _safetensors().numpy.save_file(tensors, path)


_READERS: Mapping[str, Any] = MappingProxyType({".npz": _of_npz, ".safetensors": _of_safetensors})
_WRITERS: Mapping[str, Callable[[dict[str, np.ndarray], str], None]] = MappingProxyType(
    {".npz": _write_npz, ".safetensors": _write_safetensors})

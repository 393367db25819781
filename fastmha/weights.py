"""Weights of attention modules from files and into files, under the names that other libraries gave them.

`load` looks at names, shapes and types of all that it needs before it reads anything, and changes the module at the end, as a
whole. ``.safetensors`` files need the extra ``weights``: ``pip install "fastmha[weights]"``.
"""
from __future__ import annotations

import json
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar

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


# Each layout has one or more forms; the one of which most weights are there is the file's.
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
_BESIDE: Mapping[str, frozenset[str]] = MappingProxyType({
    "bert": frozenset(f"output.LayerNorm.{name}" for name in ("weight", "bias", "gamma", "beta")),
    "gpt2": frozenset({"bias", "masked_bias"}),
    "llama": frozenset({"rotary_emb.inv_freq"}),
})
_REFUSED = {
    "bias_k": "a learned key that every sequence gets: the module has none",
    "bias_v": "a learned value that every sequence gets: the module has none",
    **{f"{x}_norm.{which}": f"of a norm of {what}, which forward's transform_qk would have to compute"
       for x, what in (("q", "queries"), ("k", "keys")) for which in ("weight", "bias")},
    "sinks": "which forward takes as sinks, not the module",
}


def load(file_or_mapping: Any, module: _Module, prefix: str = "", layout: str | None = None) -> _Module:
    """Copy the weights of one attention layer into a module.

    Parameters
    ----------
    file_or_mapping : path or mapping
        A ``.safetensors`` or ``.npz`` file, or what maps names to arrays: a ``state_dict`` of torch, too. Of files only what is
        needed is read; nothing in them is executed.
    module : MultiHeadAttention or SelfAttention
        Not frozen; of the sizes and with the biases in the file. float16 and bfloat16 are widened, float64 is rounded to the
        module's type.
    prefix : str
        What stands before the layer's names, such as ``"encoder.layer.0.attention"``.
    layout : {"torch", "bert", "gpt2", "llama", "fastmha"}, optional
        Whose names they are; by default told from them. "torch": `torch.nn.MultiheadAttention`, its weights in one or apart.
        "bert": BERT and what has its names. "gpt2": Conv1D, weights (in, out). "llama": also Mistral, Qwen2 and Gemma, whose
        rotary positions are for forward's transform_qk.

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
    ImportError
        For a ``.safetensors`` file without safetensors.

    Examples
    --------
    >>> import numpy as np, fastmha, fastmha.weights
    >>> m = fastmha.MultiHeadAttention(8, 2, rng=0)
    >>> state = {"in_proj_weight": np.ones((24, 8), np.float32), "out_proj.weight": np.zeros((8, 8), np.float32)}
    >>> float(fastmha.weights.load(state, m).W_K.sum())
    64.0
    """
    start = _checked(module, prefix)
    if layout is not None:
        validate.choice("layout", layout, LAYOUTS)
    if module._frozen:
        raise ValueError("module is frozen: call unfreeze() first")
    shapes = {name: p.shape for name, p in module.parameters().items()}
    with _opened(file_or_mapping) as source:
        wanted = _wanted(source, start, layout, shapes)
        for name, tensor in wanted.items():
            found, expected = source.shape(start + name), _stored_shape(tensor, shapes)
            if found != expected:
                one = "" if expected else ", side by side in one tensor"
                raise ValueError(f"{start}{name} in {source.name} must hold {_said(tensor, shapes)} of the module"
                                 f"{one or f' as {expected}'}, got shape {found}")
        state: dict[str, np.ndarray] = {}
        for name, tensor in wanted.items():
            array = _in_type(f"{start}{name} in {source.name}", source.read(start + name), module.dtype)
            array = array.T if tensor.turned else array
            ends = np.cumsum([shapes[p][-1] for p in tensor.parameters])[:-1]
            state.update(zip(tensor.parameters, np.split(array, ends, axis=-1), strict=True))
    module.load_state_dict(state)       # of its type and shapes: copying them in can no more fail in the middle
    return module


def save(module: AttentionModule, file: Any, layout: str = "fastmha", prefix: str = "") -> None:
    """Write a module's weights to a file, which appears as a whole or not at all.

    Parameters
    ----------
    module : MultiHeadAttention or SelfAttention
    file : path
        Its name ends in ``.safetensors`` or ``.npz``, which holds bfloat16 as float32. What is there is replaced.
    layout : {"torch", "bert", "gpt2", "llama", "fastmha"}
        Whose names to write, as in `load`.
    prefix : str
        What to write before them.

    Raises
    ------
    ValueError, TypeError
        For another ending, and for a module that the layout has no names for: "torch", "bert" and "gpt2" know neither fewer
        key/value heads nor heads of a width of their own, and biases of all four products ("torch": or of none).
    OSError
        If the file cannot be written.
    ImportError
        For a ``.safetensors`` file without safetensors.

    Examples
    --------
    >>> import tempfile, fastmha, fastmha.weights
    >>> m = fastmha.MultiHeadAttention(8, 2, rng=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fastmha.weights.save(m, f"{folder}/layer.npz", "torch")
    ...     copy = fastmha.weights.load(f"{folder}/layer.npz", fastmha.MultiHeadAttention(8, 2, rng=1))
    >>> bool((copy.W_K == m.W_K).all())
    True
    """
    start = _checked(module, prefix)
    validate.choice("layout", layout, LAYOUTS)
    path = _path("file", file, _WRITERS)
    parameters = module.parameters()
    form = next((form for form in _FORMS[layout] if _writable(layout, form, parameters, module.d_model)), None)
    if form is None:
        shapes = {name: p.shape for name, p in parameters.items()}
        raise ValueError(f'layout "{layout}" has no names for a module with {_said(_Tensor(tuple(shapes)), shapes)}')
    tensors = {}
    for name, tensor in form.items():
        if tensor.parameters[0] in parameters:
            array = np.concatenate([parameters[p] for p in tensor.parameters], axis=-1)
            if path.suffix == ".npz" and array.dtype.name == "bfloat16":       # which .npy knows no name for
                array = array.astype(np.float32)
            tensors[start + name] = np.ascontiguousarray(array.T if tensor.turned else array)
    path = Path(os.path.realpath(path))     # a link stays one
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")     # short: the longest name has room for it
    try:
        with open(temporary, "xb") as target:       # with the permissions of any new file
            _WRITERS[path.suffix](tensors, target)
            target.flush()
            os.fsync(target.fileno())       # its contents are there before its name is
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _checked(module: Any, prefix: Any) -> str:
    """What stands before names, with its dot."""
    if not isinstance(module, AttentionModule):
        raise TypeError(f"module must be a MultiHeadAttention, got {type(module).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    if not prefix.isprintable():        # archives end a name at "\0", and not all else can be encoded
        raise ValueError(f"prefix must be printable, got {validate.short(prefix)}")
    return prefix if not prefix or prefix.endswith(".") else f"{prefix}."


def _path(argument: str, given: Any, endings: Mapping[str, Any], other: str = "") -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a path{other}, got {type(given).__name__}")
    path = Path(given)
    if path.suffix not in endings:
        raise ValueError(f"{argument} must end in {' or '.join(endings)}, got {validate.short(path.name)}")
    return path


# -------------------------------------------------------------------------------------------------------------- names

def _wanted(source: _Source, start: str, layout: str | None, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, _Tensor]:
    """The tensors of the module's parameters: all of them are there, and nothing else that would belong to the layer."""
    names = {name[len(start):] for name in source.names if name.startswith(start)}
    forms = [(key, form) for key in ((layout,) if layout else LAYOUTS) for form in _FORMS[key]]
    key, form = max(forms, key=lambda pair: len(_weights(pair[1]) & names) / len(_weights(pair[1])))
    if not _weights(form) & names:
        what = f'the weights of layout "{layout}"' if layout else "the weights of any layout"
        raise ValueError(f"{source.name} has not {what} after prefix {validate.short(start)}{_hint(source, forms)}")
    for name, reason in _REFUSED.items():
        if name in names:
            raise ValueError(f"{source.name} holds {start}{name}, {reason}")
    wanted = {name: tensor for name, tensor in form.items() if tensor.parameters[0] in shapes}
    unknown = sorted(names - form.keys() - _BESIDE.get(key, frozenset()))
    for name, tensor in wanted.items():
        if name not in names:
            beside = f"; it holds {start}{validate.cut(', '.join(unknown))}, which is no part of that" if unknown else ""
            beside = _hint(source, forms, start) or beside
            raise ValueError(f"{source.name} has no {start}{name}, which holds {', '.join(tensor.parameters)} in layout "
                             f'"{key}"{beside}')
    if unknown:
        raise ValueError(f"{source.name} holds {start}{validate.cut(', '.join(unknown))}, which is no part of attention in "
                         f'layout "{key}": prefix and layout say what to read')
    for name in sorted(names & form.keys() - wanted.keys()):
        raise ValueError(f"{source.name} holds {start}{name}, but the module has no {', '.join(form[name].parameters)}: use_bias "
                         "says which biases there are")
    return wanted


def _weights(form: Mapping[str, _Tensor]) -> set[str]:
    return {name for name, tensor in form.items() if tensor.parameters[0].startswith("W")}


def _hint(source: _Source, forms: list[tuple[str, Mapping[str, _Tensor]]], within: str = "") -> str:
    """What stands before the names of each layer of one of these forms, in words; nothing where there is none."""
    starts = ((name.removesuffix(min(weights)), weights) for weights in (_weights(form) for _, form in forms)
              for name in source.names if name.startswith(within) and name.endswith(f".{min(weights)}"))
    begins = sorted({start for start, weights in starts if all(start + name in source.names for name in weights)})
    return f"; its attention layers begin with {validate.cut(', '.join(begins))}" if begins else ""


def _said(tensor: _Tensor, shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shapes[name]}" for name in tensor.parameters)


def _stored_shape(tensor: _Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """None where the parameters do not fit side by side."""
    of = [shapes[p] for p in tensor.parameters]
    if any(s[:-1] != of[0][:-1] for s in of):
        return None
    shape = (*of[0][:-1], sum(s[-1] for s in of))
    return shape[::-1] if tensor.turned else shape


def _writable(layout: str, form: Mapping[str, _Tensor], parameters: Mapping[str, np.ndarray], d_model: int) -> bool:
    """Whether who knows this form would read from it what these parameters are."""
    shapes = {name: p.shape for name, p in parameters.items()}
    if any(tensor.parameters[0] in shapes and _stored_shape(tensor, shapes) is None for tensor in form.values()):
        return False
    if layout in ("fastmha", "llama"):
        return True
    biases = sum(name.startswith("b") for name in shapes)
    return (all(shape[-1] == d_model for shape in shapes.values()) and biases in ((0, 4) if layout == "torch" else (4,))
            and (layout == "torch" or all(shape[0] == d_model for shape in shapes.values())))


# -------------------------------------------------------------------------------------------------------------- files

class _Source(NamedTuple):
    """What tensors come from."""

    name: str                                       # in messages
    names: frozenset[str]
    shape: Callable[[str], tuple[int, ...]]         # of a tensor whose type is found to be one of floats
    read: Callable[[str], np.ndarray]               # in that type, bfloat16 in float32


@contextmanager
def _opened(given: Any) -> Iterator[_Source]:
    if isinstance(given, Mapping):
        yield _of_mapping(given)
        return
    path = _path("file_or_mapping", given, _READERS, " or a mapping of names to arrays")
    with open(path, "rb") as file, _READERS[path.suffix](path, file) as source:     # OSError as it comes
        yield source


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Whatever a library says of damaged bytes, and of what kind it may be, as one kind of error."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} cannot be read: {validate.cut(error) or type(error).__name__}") from error


def _no_floats(name: str, dtype: Any) -> ValueError:
    return ValueError(f"{name} must hold floats of 16, 32 or 64 bits, got {validate.cut(dtype)}")


def _in_type(name: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore", over="raise"):
        try:
            return x.astype(dtype, copy=False)
        except FloatingPointError:
            raise ValueError(f"{name} holds numbers beyond {dtype}") from None


def _of_mapping(given: Mapping[Any, Any]) -> _Source:
    strange = next((name for name in given if not isinstance(name, str)), None)
    if strange is not None:
        raise TypeError(f"file_or_mapping must map names to arrays, got the name {validate.short(strange)}")

    @cache
    def array(name: str) -> np.ndarray:
        with _damage(f"{name} in the mapping"):
            x = given[name]
            if hasattr(x, "detach"):        # a tensor
                x = x.detach().cpu()
                x = x.clone() if x._is_zerotensor() else x.resolve_neg()        # what is in no memory yet
                x = x.float() if str(x.dtype) == "torch.bfloat16" else x        # which NumPy has not
        x = validate.as_array(name, x)
        if x.dtype.name == "bfloat16":
            return x.astype(np.float32)
        if x.dtype.kind != "f" or x.dtype.itemsize > 8:
            raise _no_floats(f"{name} in the mapping", x.dtype)
        return x

    return _Source("the mapping", frozenset(given), lambda name: array(name).shape, array)


@contextmanager
def _of_npz(path: Path, file: BinaryIO) -> Iterator[_Source]:
    with _damage(path.name):
        archive = zipfile.ZipFile(file)
        listed = archive.namelist()
        if len(set(listed)) < len(listed):
            raise ValueError("it holds two members of one name")
    members = {name.removesuffix(".npy"): archive.getinfo(name) for name in listed if name.endswith(".npy")}

    @contextmanager
    def opened(name: str) -> Iterator[tuple[Any, str, bool, tuple[int, ...]]]:
        with _damage(f"{name} in {path.name}"):
            # those that NumPy writes; others take as much memory as they ask for
            if members[name].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"its compression is {members[name].compress_type}, neither stored nor deflated")
            with archive.open(members[name]) as member:
                yield member, *_npy_header(member)

    def shape(name: str) -> tuple[int, ...]:
        with opened(name) as (_, dtype, _, found):
            pass
        if not re.fullmatch(r"[<>|=]?f[248]", dtype):
            raise _no_floats(f"{name} in {path.name}", dtype)
        return found

    def read(name: str) -> np.ndarray:
        with opened(name) as (member, dtype, by_columns, found):
            size = prod(found) * np.dtype(dtype).itemsize
            data = member.read(size + 1)        # to the end, where its checksum is looked at
            if len(data) != size:
                raise ValueError(f"{'more' if len(data) > size else 'less'} than the {size} bytes of its shape")
            return np.frombuffer(data, dtype).reshape(found, order="F" if by_columns else "C")

    with archive:
        yield _Source(path.name, frozenset(members), shape, read)


# what NumPy writes, but for spaces; its own reader evaluates whatever stands there
_NPY_HEADER = re.compile(r"\{'descr':(?:'([^']*)'|(\[.*\])),'fortran_order':(True|False),'shape':\(((?:\d{1,18},?)*)\),?\}")


def _npy_header(file: Any) -> tuple[str, bool, tuple[int, ...]]:
    """Type, order and shape of a .npy file, which is left where its numbers begin."""
    magic = file.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise ValueError("it does not begin as .npy files of version 1, 2 or 3 do")
    length = int.from_bytes(file.read(2 if magic[6] == 1 else 4), "little")
    if length > 10_000:
        raise ValueError(f"its header would be {length} bytes long")
    found = _NPY_HEADER.fullmatch("".join(file.read(length).decode("latin1").split()))
    if found is None:
        raise ValueError("its header is not one that NumPy writes")
    simple, structured, by_columns, shape = found.groups()
    return structured or simple, by_columns == "True", tuple(int(n) for n in shape.split(",") if n)


@contextmanager
def _of_safetensors(path: Path, file: BinaryIO) -> Iterator[_Source]:
    library = _safetensors()
    with _damage(path.name):
        opened = library.safe_open(path, framework="np")
    with opened:

        def look(name: str) -> tuple[str, tuple[int, ...]]:
            with _damage(f"{name} in {path.name}"):
                part = opened.get_slice(name)
                return part.get_dtype(), tuple(part.get_shape())

        def shape(name: str) -> tuple[int, ...]:
            dtype, found = look(name)
            if dtype not in ("F64", "F32", "F16", "BF16"):
                raise _no_floats(f"{name} in {path.name}", dtype)
            return found

        def read(name: str) -> np.ndarray:
            dtype, found = look(name)
            with _damage(f"{name} in {path.name}"):
                if dtype != "BF16":
                    return opened.get_tensor(name)
                # NumPy has none: 8 bytes of length, so much JSON and the tensors, which safetensors has found to be whole
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                first, _ = json.loads(file.read(length))[name]["data_offsets"]
                halves = np.fromfile(path, "<u2", prod(found), offset=8 + length + first)
                return (halves.astype(np.uint32) << 16).view(np.float32).reshape(found)

        yield _Source(path.name, frozenset(opened.keys()), shape, read)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError('.safetensors files need safetensors: pip install "fastmha[weights]"') from error
    return safetensors


_READERS: Mapping[str, Any] = MappingProxyType({".safetensors": _of_safetensors, ".npz": _of_npz})
_WRITERS: Mapping[str, Callable[[dict[str, np.ndarray], Any], Any]] = MappingProxyType({
    ".safetensors": lambda tensors, file: file.write(_safetensors().numpy.save(tensors)),
    ".npz": lambda tensors, file: np.savez(file, **dict[str, Any](tensors)),
})

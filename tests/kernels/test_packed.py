"""Packed weights: products have the same bits as with widened weights, nothing else is taken for a packed
matrix, and no memory leaks."""

import ctypes
import gc
import threading

import numpy as np
import pytest
from checkpoints import make_checkpoint
from gguf_models import make_pair
from long_forms import number_of
from parity import CONFIGS, same_bits, seed_of, whole
from processes import python

from distributed.group import Ranks
from kernels import device, library
from kernels.device import mx, tree_flatten
from kernels.packed import Matrix, address, dequantized, joined, packed
from models import mxfp4
from models.forward_cost import arrays, nbytes_of
from models.load import ModelReader, read_model
from models.memory import is_batch_invariant
from nanobatch import Engine, SamplingParams

pytestmark = pytest.mark.skipif(
    not device.is_batch_invariant(), reason="our own product does not run here"
)

TURNS = number_of("LOADS", 12)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def normal(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def quantized(seed: int, shape: tuple, bits: int, group: int, scales: str = "float16") -> Matrix:
    arrays = mx.quantize(normal(seed, *shape).astype(DTYPES[scales]), group_size=group, bits=bits)
    return Matrix(arrays[0], None, *arrays[1:], bits, group)


def of_16_bits(seed: int, shape: tuple, dtype: str, factor: float = 1) -> Matrix:
    weight = normal(seed, *shape).astype(DTYPES[dtype])
    scales = mx.full((*shape[:-1], 1), factor, mx.float32)
    return Matrix(weight, None, scales, bits=16, group=shape[-1])


def centered(seed: int, shape: tuple, bits: int) -> Matrix:
    """Return a matrix like GGUF's Q4_0, Q5_0 and Q8_0: an offset is its scale times a power of two."""
    plain = quantized(seed, shape, bits, 32)
    return plain._replace(offsets=None, center=-float(2 ** (bits - 1)))


def of_mxfp4(seed: int, shape: tuple) -> Matrix:
    weight, scales = mx.quantize(normal(seed, *shape), mode="mxfp4")
    own = mxfp4.decoded(weight.flatten(0, -2)).reshape(*shape[:-1], -1), mxfp4.powers(scales)
    return Matrix(own[0], None, own[1], None, mxfp4.BITS, mxfp4.GROUP, center=mxfp4.CENTER)


def of_bytes(seed: int, shape: tuple, bits: int, group: int, center: float = 0.0) -> Matrix:
    """Return a matrix like GGUF's K-quants: a scale is a byte times a float16 number for 256 weights."""
    rng = np.random.default_rng(seed)
    *out, K = shape
    weight = rng.integers(0, 2**32, (*out, K * bits // 32), dtype=np.uint32)

    def factors() -> mx.array:
        numbers = rng.integers(0, 256, (*out, K // group), dtype=np.uint8)
        sizes = (rng.random((*out, K // 256)) / 9999).astype(np.float16).view(np.uint8)
        return mx.array(np.concatenate([numbers, sizes], axis=-1))

    offsets = None if center else factors()
    return Matrix(mx.array(weight), None, factors(), offsets, bits, group, center=center)


def spread(part: Matrix) -> list[mx.array]:
    """Return scales and offsets as float32 numbers, one for each byte."""
    found = []
    groups = part.weight.shape[-1] * 32 // part.bits // part.group
    for factors in (part.scales, part.offsets):
        if factors is None:
            return [found[0], found[0] * part.center]
        data = np.array(factors)
        sizes = np.ascontiguousarray(data[..., groups:]).view(np.float16).astype(np.float32)
        numbers = data[..., :groups].astype(np.float32) - 128
        found.append(mx.array(numbers * sizes.repeat(256 // part.group, axis=-1)))
    return found


def widened(matrix: Matrix) -> mx.array:
    """Return the float32 weights that are used where nothing stays packed."""
    if matrix.bits == 16:
        return matrix.weight.astype(mx.float32) * matrix.scales
    if matrix.claim:
        return matrix.embed(mx.arange(len(matrix.scales)))
    if matrix.scales.dtype == mx.uint8:
        factors = spread(matrix)
    else:
        scales = matrix.scales.astype(mx.float32)
        offsets = scales * matrix.center if matrix.center else matrix.offsets.astype(mx.float32)
        factors = [scales, offsets]
    return dequantized(matrix.weight, *factors, matrix.group, matrix.bits)


# --- the same bits ------------------------------------------------------------------------------

QUANTIZED = [
    (4, 32, "float16"),
    (4, 64, "bfloat16"),
    (4, 128, "float32"),
    (8, 32, "float32"),
    (8, 64, "float16"),
    (8, 128, "bfloat16"),
    (2, 64, "float16"),
    (3, 64, "bfloat16"),
    (5, 128, "float32"),
    (6, 32, "float16"),
]
KINDS = [(quantized, *each) for each in QUANTIZED]
KINDS += [(of_bytes, 4, 32), (of_bytes, 5, 32), (of_bytes, 6, 16, -32.0)]
KINDS += [(centered, 4), (centered, 5), (centered, 8)]
KINDS += [(of_16_bits, "float16"), (of_16_bits, "bfloat16", 0.3)]
EACH_KIND = pytest.mark.parametrize(
    ("make", "how"),
    [pytest.param(make, how, id=f"{make.__name__}-{how}") for make, *how in KINDS],
)
# Realistic sizes: the sum is split along K, a thread's share ends inside a tile, blocks span shares, and
# a row has an odd number of blocks of 256 weights
SIZES = [(100, 8192), (1030, 512), (2500, 256), (35, 2304)]


@EACH_KIND
def test_packed_product_has_the_widened_bits(make, how):
    """Test one row, a few, more than one strip, and as many as a prompt has, and two matrices joined into
    one."""
    for seed, (N, K) in enumerate(SIZES):
        K -= 5 * (make is of_16_bits)  # not a multiple of any vector width
        parts = [make(seed + n, (N + n, K), *how) for n in (0, 9)]
        matrix = packed(joined(parts))
        wide = mx.concatenate([widened(part) for part in parts])
        assert matrix.size == wide.size and mx.array_equal(widened(matrix), wide)
        for count in (1, 7, 13, 200):
            x = normal(count, count, K)
            assert mx.array_equal(matrix(x), x @ wide.T), (N, K, count)
        ids = mx.array([[0, N], [N + 3, 1]])
        assert mx.array_equal(matrix.embed(ids), wide[ids])


def row_by_row(experts: list[Matrix], x: mx.array, chosen: mx.array) -> mx.array:
    """Compute each row with its experts, one after another."""
    x = mx.broadcast_to(x, (*chosen.shape, x.shape[-1])).flatten(0, 1)
    pairs = zip(x, chosen.flatten().tolist(), strict=True)
    return mx.stack([experts[expert](row[None])[0] for row, expert in pairs])


@EACH_KIND
def test_packed_experts_have_the_widened_bits(make, how):
    """Test few rows and many, with one input for all experts of a row or one for each. A single row leaves some
    experts without rows."""
    parts = [make(3 + n, (5, 70, 512), *how) for n in (0, 9)]
    parts = [part._replace(bias=normal(n, 5, 70)) for n, part in enumerate(parts)]
    stack = packed(*parts)
    assert stack.weight.shape[:2] == (5, 140)
    wide = mx.concatenate([widened(part) for part in parts], axis=1)
    bias = mx.concatenate([part.bias for part in parts], axis=1)
    for stack in (packed(*parts), packed(Matrix(wide, bias))):
        for count in (1, 9, 130):
            chosen = mx.array(np.random.default_rng(0).integers(0, 9, (count, 3))) // 2
            x = normal(1, count, 3 if count == 9 else 1, 512)
            right = Matrix(wide, bias).of_experts(x, chosen)  # computed by MLX, row by row
            assert mx.array_equal(stack.of_experts(x, chosen), right), count


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda seed: quantized(seed, (37, 1152), 4, 64), id="4 bits"),
        pytest.param(lambda seed: of_bytes(seed, (37, 1280), 5, 32), id="Q5_K"),
        pytest.param(lambda seed: of_bytes(seed, (37, 1280), 6, 16, -32.0), id="Q6_K"),
        pytest.param(lambda seed: centered(seed, (37, 96), 8), id="Q8_0"),
        pytest.param(lambda seed: of_mxfp4(seed, (37, 288)), id="MXFP4"),
    ],
)
def test_experts_round_each_row_by_itself(make):
    parts = [make(seed) for seed in range(4)]
    experts = [packed(part, rounds=True) for part in parts]
    arrays = {name: mx.stack([part.arrays[name] for part in parts]) for name in parts[0].arrays}
    stack = packed(parts[0]._replace(**arrays), rounds=True)
    rng = np.random.default_rng(0)
    for count in (1, 5, 60):
        chosen = mx.array(rng.integers(0, 7, (count, 2)) // 2)
        x = normal(count, count, 2 if count == 5 else 1, parts[0].width) ** 3
        found = stack.of_experts(x, chosen).flatten(0, 1)
        assert mx.array_equal(found, row_by_row(experts, x, chosen)), count


@pytest.mark.parametrize("rounds", [True, False])
def test_mxfp4_as_in_a_file_is_packed_into_the_same_matrix(rounds):
    """gpt-oss's experts are packed directly, without an intermediate form in five bits."""
    whole = of_mxfp4(3, (5, 37, 288))
    codes = mx.quantize(normal(3, 5, 37, 288), mode="mxfp4")[0].view(mx.uint8)
    found, right = (packed(part, rounds=rounds) for part in (whole._replace(weight=codes), whole))
    for name, array in right.arrays.items():
        assert mx.array_equal(found.arrays[name], array), name


def rounded_product(x: np.ndarray, part: Matrix) -> np.ndarray:
    """Return the product in float64, with each 32 numbers of a row, or a smaller group, rounded to integers
    from -127 to 127."""
    wide = np.array(packed(part).embed(mx.arange(len(part.weight))), np.float64)
    groups = x.reshape(len(x), -1, min(part.group, 32))
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    numbers = np.rint(groups * (np.float32(127) / np.where(largest == 0, 1, largest)))
    return (numbers * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape) @ wide.T


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(quantized(1, (37, 2304), 4, 64), id="4 bits"),
        pytest.param(quantized(2, (16, 2304), 8, 128, "float32"), id="8 bits"),
        pytest.param(quantized(5, (33, 2304), 3, 128), id="3 bits"),
        pytest.param(quantized(6, (17, 2304), 5, 64, "bfloat16"), id="5 bits"),
        pytest.param(quantized(7, (20, 2304), 6, 32), id="6 bits"),
        pytest.param(of_bytes(3, (50, 2304), 4, 32), id="Q4_K"),
        pytest.param(of_bytes(8, (21, 2304), 5, 32), id="Q5_K"),
        pytest.param(of_bytes(4, (5, 2304), 6, 16, -32.0), id="Q6_K"),
        pytest.param(centered(9, (18, 96), 4), id="Q4_0"),
        pytest.param(centered(10, (18, 96), 5), id="Q5_0"),
        pytest.param(centered(11, (18, 96), 8), id="Q8_0"),
        pytest.param(of_mxfp4(12, (37, 2304)), id="MXFP4"),
    ],
)
def test_int8_activations_round_each_row_by_itself(part):
    """No sum of bytes overflows, no row depends on others, and no NaN is lost."""
    matrix = packed(part, rounds=True)
    width = matrix.width
    x = np.array(normal(0, 70, width)) ** 3
    x[1] = 1e-3 * np.sign(x[1])  # the largest integers everywhere
    x[2, : width // 2] = 0
    y = np.array(matrix(mx.array(x)))
    expected = rounded_product(x, part)
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
    for row in (0, 1, 2, 68):
        assert np.array_equal(np.array(matrix(mx.array(x[row : row + 1])))[0], y[row])
    x[4, 5], x[5, 6] = np.nan, np.inf
    z = np.array(matrix(mx.array(x)))
    assert np.isnan(z[4:6]).all() and np.array_equal(z[:4], y[:4])
    ids = mx.array([[0, 4], [3, 1]])
    assert mx.array_equal(matrix.embed(ids), packed(part).embed(ids))


@pytest.mark.parametrize(
    ("config", "dtype", "rounds"),
    [
        ({"quantize": lambda module: (4, 32)}, "auto", True),
        ({"quantize": lambda module: (4, 32)}, "float32", False),
        ({}, "auto", False),
    ],
)
def test_activations_have_8_bits_where_packed_weights_are_multiplied(
    config, dtype, rounds, tmp_path
):
    """Check which models round activations by default. With `activations=32` none does."""
    folder = make_checkpoint(tmp_path, **config)
    usual, asked = (ModelReader(folder, dtype, **how) for how in ({}, {"activations": 32}))
    assert (usual.rounds, asked.rounds) == (rounds, False)
    said = Engine.load(folder, dtype=dtype, slots=1, max_len=64).summary
    assert ("activations of 8 bits" in said) == rounds


def test_int8_activations_want_packed_weights(tmp_path):
    folder = make_checkpoint(tmp_path, seed=0)
    with pytest.raises(ValueError, match="activations = 8 is for weights of 8 bits or fewer"):
        Engine.load(folder, activations=8)


PRECISIONS = ("as it is", "float16", "bfloat16")


def lean(name: str, way: str) -> dict:
    """Return a configuration of the parity tests, in a precision that allows packing."""
    changes = {key: value for key, value in CONFIGS[name].items() if key != "reference"}
    return changes if way == "as it is" else {**changes, "dtype": DTYPES[way]}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_has_the_widened_bits(name, tmp_path):
    """Test folded factors, tied heads, biases, fused projections, windows, experts, norms that add 1, and each
    way to pack a matrix, in passes over 45, 9 and 1 tokens."""
    seed = seed_of(name)
    way = PRECISIONS[seed % 3] if "quantize" in CONFIGS[name] else PRECISIONS[1 + seed % 2]
    folder = make_checkpoint(tmp_path, seed=seed, **lean(name, way))
    narrow, wide = read_model(folder, activations=32), read_model(folder, "float32")
    assert is_batch_invariant(narrow) and is_batch_invariant(wide)
    assert claimants(narrow) and not any(part.bits for part in claimants(wide))
    tokens = np.random.default_rng(seed).integers(0, 250, 45).tolist()
    assert same_bits(narrow, wide, tokens) and same_bits(narrow, wide, tokens[:9]), way
    kept = [part for part in claimants(narrow) if part.bits < 16]
    assert {part.bits for part in kept} <= {4, 8}
    assert narrow.cost.nbytes < 0.8 * wide.cost.nbytes


def claimants(model) -> list:
    """Return all matrices with a `claim`: packed ones, and stacks of experts."""
    parts = (model.layers, model.table, model.head)
    found = tree_flatten(parts, is_leaf=lambda part: isinstance(part, Matrix))
    return [part for _, part in found if isinstance(part, Matrix) and part.claim]


WAYS = ("4 bits", "8 bits, scales of float32", "bfloat16")
CUTS = [(way, size) for way in WAYS for size in (2, 3, 4)]
CUTS += [(way, size) for way in ("Q5_0", "Q4_K", "Q6_K") for size in (2, 4)]


@pytest.mark.parametrize(("way", "size"), CUTS)
def test_shard_has_the_widened_bits(tmp_path, way, size):
    """With 3 and 4 ranks `o` and `down` are cut inside a group, so the shard is dequantized. Scales in bytes are
    widened if a rank has a part of each row."""
    changes = {"hidden_size": 128, "intermediate_size": 256, "attention_bias": True}
    if way.startswith("Q"):
        lean, folder = make_pair(tmp_path, way, num_hidden_layers=1, hidden_size=512)
    elif way == "bfloat16":
        lean = folder = make_checkpoint(tmp_path, dtype=mx.bfloat16, **changes)
    else:
        changes["dtype"] = mx.float32 if "float32" in way else mx.float16
        changes["quantize"] = lambda module: (int(way[0]), 64)
        lean = folder = make_checkpoint(tmp_path, **changes)
    seen = set()
    for rank in range(size):
        ranks = Ranks(rank, size)
        narrow = ModelReader(lean, ranks=ranks, activations=32).read_model().layers[0]
        wide = ModelReader(folder, "float32", ranks).read_model().layers[0]
        (narrow_mlp, *_), (wide_mlp, *_) = narrow.mlp.steps, wide.mlp.steps
        for part, right in (
            (narrow.qkv, wide.qkv),
            (narrow_mlp.gate_up, wide_mlp.gate_up),
            (narrow.out.steps[0], wide.out.steps[0]),
            (narrow_mlp.down, wide_mlp.down),
        ):
            seen.add(part.claim is not None)
            x = normal(rank, 5, right.weight.shape[1])
            assert mx.array_equal(part(x), right(x))
    assert True in seen and (False in seen) == ("bits" in way and size > 2)


# --- how a packed matrix is recognized ----------------------------------------------------------


def test_float32_is_not_taken_for_packed():
    """Matrices that differ from a packed one in one bit of the key are plain float32. (The key may be a
    NaN, so the first column of a result is not compared.)"""
    matrix = packed(quantized(1, (64, 64), 8, 32))
    begins = (ctypes.c_char * library.LINE).from_address(address(matrix.weight) - library.LINE)
    x, wide = normal(2, 3, 64), np.array(normal(3, 64, 64))
    for bit in range(128):
        line = np.frombuffer(bytes(begins), np.uint8).copy()
        line[bit // 8] ^= 1 << bit % 8
        wide[0, : library.LINE // 4] = line.view(np.float32)
        right = np.array(x, np.float64) @ wide[1:].astype(np.float64).T
        found = np.array(x @ mx.array(wide).T)[:, 1:]
        assert np.allclose(found, right, atol=1e-4)
    assert mx.array_equal(x @ mx.zeros((64, 64)).T, mx.zeros((3, 64)))


def test_lazy_product_holds_the_matrix():
    """Regression: the model was freed and its memory reused before the graph was evaluated."""
    x = normal(1, 3, 512)
    for seed in range(6):
        part = quantized(seed, (300, 512), 4, 64)
        right = np.array(x @ widened(part).T)
        later = packed(part)(x)
        gc.collect()
        others = [mx.random.normal((300, 512)) for _ in range(4)]
        mx.eval(others)
        assert np.array_equal(np.array(later), right)


def test_wrong_shape_ends_the_process():
    """A product with a wrong shape ends the process with one line instead of reading beyond the matrix."""
    code = (
        "import sys; sys.path[:0] = ['tests/lib', 'tests/kernels', 'tools']\n"
        "from kernels import device\n"
        "from test_packed import *\n"
        "matrix = packed(quantized(1, (64, 64), 8, 32))\n"
        "mx.eval(normal(1, 2, 64) @ matrix.claim.array[:, :32])\n"
    )
    done = python(code)
    assert done.returncode == -6, done
    assert "a packed matrix of 64 x 64 is multiplied as 32 x 64" in done.stderr


def test_loads_while_another_computes(tmp_path):
    """Models can be loaded and freed while another engine runs, with the same answers and no leak."""
    changes = {"hidden_size": 128, "intermediate_size": 256, "quantize": lambda module: (4, 64)}
    folder = make_checkpoint(tmp_path / "a", seed=1, **changes)
    other = make_checkpoint(tmp_path / "b", seed=2, dtype=mx.bfloat16)
    begun, ends, wrong = threading.Event(), threading.Event(), []
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)

    def work() -> None:
        with Engine.load(other, slots=4, max_len=64) as engine:
            right = engine.generate([[5, 6, 7], [8, 9]], sampling)
            begun.set()
            while not ends.is_set():
                found = engine.generate([[5, 6, 7], [8, 9]], sampling)
                wrong.append([a.tokens for a in found] != [b.tokens for b in right])

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    answers, taken = set(), []
    turn = 0
    while turn < TURNS or (len(wrong) < 4 and thread.is_alive()):
        with device.device_lock, device.device_stream():
            model = read_model(folder, activations=32)
            answers.add(whole(model, [3, 1, 4, 1, 5, 9]).tobytes())
            del model
            gc.collect()
            if turn % 3 == 2:
                device.synchronize()
                taken.append(mx.get_active_memory())
        turn += 1
    ends.set()
    thread.join()
    assert len(answers) == 1 and len(wrong) >= 4 and not any(wrong)
    assert len(taken) > 3 and max(taken[1:]) <= taken[0] + 2**20, taken


# --- memory, and what stays unpacked ------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_memory_is_as_estimated(tmp_path, bits):
    """The estimate made before the first tensor is read, which `fit` uses, is right, and loading widens
    nothing."""
    changes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "vocab_size": 4000,
        "dtype": mx.float16,
    }
    if bits < 16:
        changes["quantize"] = lambda module: (bits, 64)
    folder = make_checkpoint(tmp_path, **changes)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    reader = ModelReader(folder)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = reader.read_model()
    taken, most = mx.get_active_memory() - before, mx.get_peak_memory() - before
    del reader
    assert taken <= 1.02 * stored
    assert taken == pytest.approx(ModelReader(folder).nbytes, rel=0.02)
    largest = max(array.nbytes for array in arrays((model.layers, model.table)))
    assert most <= taken + 3.5 * largest
    assert model.cost.form == {4: "4 bits in groups of 64", 8: "8 bits in groups of 64"}.get(
        bits, "float16"
    )


@pytest.mark.parametrize("way", ["Q4_0", "Q5_0", "Q8_0", "Q5_K", "Q6_K", "3", "4", "5", "6", "8"])
def test_memory_of_each_format_is_as_estimated(tmp_path, way):
    """With activations of 8 bits, weights have about the size of the file, except for 3 bits. Offsets that
    follow from scales are not stored."""
    if way.startswith("Q"):
        folder, _ = make_pair(tmp_path, way, num_hidden_layers=1, hidden_size=512)
    else:
        changes = {"hidden_size": 512, "intermediate_size": 1024, "dtype": mx.float16}
        folder = make_checkpoint(tmp_path, quantize=lambda module: (int(way), 64), **changes)
    for activations in (32, 8):
        reader = ModelReader(folder, activations=activations)
        assert nbytes_of(reader.read_model()) == reader.nbytes, activations
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    assert reader.nbytes < 1.1 * sum(path.stat().st_size for path in files) or way == "3"


def test_without_our_product_weights_are_widened(tmp_path):
    folder = make_checkpoint(tmp_path / "model", quantize=lambda module: (4, 32))
    code = (
        "from nanobatch import Engine\n"
        f"engine = Engine.load({str(folder)!r}, slots=1, max_len=64)\n"
        "print(engine.summary)\nprint(engine.is_batch_invariant)\n"
    )
    said = {}
    for choice in ("rows", "off"):
        said[choice] = python(code, NANOBATCH_BLAS=choice).stdout.splitlines()
    assert "; 4 bits in groups of 32, " in said["rows"][0] and said["rows"][1] == "True"
    assert "; float32, widened, " in said["off"][0] and said["off"][1] == "False"

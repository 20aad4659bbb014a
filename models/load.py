"""Load a model: convert its weights to the form that `forward` needs, and choose slots that fit.

A checkpoint stores queries, keys and values separately, in half precision or quantized. The forward pass
needs one matrix per product. It stays packed if the device can multiply packed weights: a GPU with MLX, a
CPU with our own product (`kernels/packed.py`).

MLX does not raise when memory runs out: the process dies. So the sizes of model and slab are computed
before the first tensor is read, and a model that does not fit is refused with sizes that would fit. Tensors
are read layer by layer, so that only one layer is in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from base.foreign_modules import foreign
from base.untrusted_files import ModelError
from base.validation import shown
from distributed.group import ALONE, Ranks
from kernels import device, fused_attention_check
from kernels.delta_net import Heads
from kernels.device import mx, readable
from kernels.library import LINE
from kernels.packed import (
    LEAST,
    MLX_GROUPS,
    Matrix,
    Memory,
    dequantized,
    groups_of,
    joined,
    packed,
    widened,
)
from models.config import LAYER_INPUT, read_config
from models.convolution import Convolution
from models.delta_net import DeltaNet
from models.embedding_support import why_not
from models.forward_cost import arrays, counted
from models.gguf_file import is_gguf
from models.gguf_weights import GgufWeights
from models.layer_embeddings import AddInput, LayerInputs, Scaled
from models.layers import (
    ExpertChoices,
    Experts,
    Layer,
    Mixer,
    Mlp,
    Model,
    Norm,
    OutputGate,
    QKNorm,
    SharedExpert,
    SideBySide,
    ValueNorm,
    chain,
)
from models.memory import Sizes, fit
from models.ops import capped
from models.rope import AttentionType, Growth
from models.sharding import Shard
from models.weights import Weights, usual_form

CHOICES = {  # see `ModelReader`
    "dtype": ("auto", "float32", "checkpoint"),
    "kv": ("auto", "float32"),
    "attention": ("auto", "plain"),
    "activations": ("auto", 8, 32),
}


def read_model(
    folder: Path,
    dtype: str = "auto",
    kv: str = "auto",
    attention: str = "auto",
    activations: str | int = "auto",
) -> Model:
    """Read the model in a folder or GGUF file for one process, without reserving memory for a slab."""
    how = {"kv": kv, "attention": attention, "activations": activations}
    return ModelReader(folder, dtype, **how).read_model()


class ModelReader:
    """A reader that builds a model from a checkpoint. The constructor checks all names and shapes.

    `dtype`: "float32", "checkpoint" (as stored in the files), or "auto" (`usual_form`).
    `ranks`: each rank reads its shard.
    `held`: bytes that will be freed before the model is read.
    `kv`: "float32", or "auto" (`kv_dtype`).
    `attention`: "plain", which is the formula in `llama.py`, or "auto" (`attention_form`).
    `activations`: 8 rounds activations to 8 bits in products with weights of 8 bits or fewer; 32 never
    rounds; "auto" rounds if our own product multiplies such weights (`can_round`).
    """

    def __init__(
        self,
        folder: Path,
        dtype: str = "auto",
        ranks: Ranks = ALONE,
        held: int = 0,
        kv: str = "auto",
        attention: str = "auto",
        activations: str | int = "auto",
    ):
        asked = {"dtype": dtype, "kv": kv, "attention": attention, "activations": activations}
        for name, value in asked.items():
            if value not in CHOICES[name]:
                choices = " or ".join(map(str, CHOICES[name]))
                raise ValueError(f"{name} = {shown(value)}; choose {choices}")
        self.kv = kv
        self.attention = attention
        self.folder = folder
        self.ranks = ranks
        self.form = usual_form() if dtype == "auto" else dtype
        self.weights = GgufWeights(folder) if is_gguf(folder) else Weights(folder)
        config = read_config(folder, self.weights.has_head)
        if not (config.tied or self.weights.has_head or why_not(folder)):
            config = replace(config, tied=True, has_head=False)
        self.weights.check_against(config)
        if config.deltas and self.weights.is_converted(config):
            config = replace(config, norms_add=False)
        if activations == 8 and not self.can_round:
            raise ValueError(
                "activations = 8 is for weights of 8 bits or fewer, on a CPU, by our own product; "
                "choose such a model, or leave it out"
            )
        if self.form == "checkpoint" and not device.has_gpu() and (kind := self.wide_experts):
            raise ValueError(
                f"dtype = 'checkpoint' with experts in {kind}, but on a CPU MLX multiplies experts "
                "in float32 or quantized; choose auto or float32"
            )
        self.rounds = activations != 32 and self.can_round
        self.share = Shard.for_rank(config, ranks.rank, ranks.size)
        self.config = self.share.config(config)
        self.sinks: dict[int, dict[int, mx.array]] = {}  # by attention type and layer
        self.choices = ExpertChoices(config.layers) if config.experts else None
        has_head = not ranks.rank
        self.memory = Memory()  # for packed matrices
        self.nbytes = self.weights.nbytes(self.config, self.form, has_head, self.rounds)
        free = device.free_memory()
        self.free = None if free is None else free + held

    @property
    def can_round(self) -> bool:
        """True if our own product multiplies weights of 8 bits or fewer."""
        return self.form == "packed" and any(t.bits for t in self.weights.tensors.values())

    @property
    def wide_experts(self) -> str:
        """The 16-bit type in which MLX would have to multiply experts; empty if there is none."""
        for name, tensor in self.weights.tensors.items():
            if ".experts." not in name or not name.endswith(".weight"):
                continue
            if tensor.bits and tensor.group not in MLX_GROUPS:
                return "float16"  # `quantized` unpacks them
            if not tensor.bits and tensor.dtype != mx.float32:
                return str(tensor.dtype).removeprefix("mlx.core.")
        return ""

    def check_room(self) -> None:
        """Refuse weights that do not fit into memory."""
        if self.free is not None and self.nbytes > self.free:
            needs = readable(self.nbytes)
            raise ModelError(
                f"{self.folder}: {needs} of weights, but {readable(self.free)} of memory are free; "
                f"choose a smaller model{', or more ranks' * (self.ranks.size > 1)}.",
                f"needs {needs} of memory",
            )

    @property
    def kv_dtype(self) -> mx.Dtype:
        """The dtype of keys and values in the slab.

        They are computed in float32. If the checkpoint has 16 bits per weight or fewer, float16 is
        enough: it changes the logits less than one bit of a weight does. This holds for bfloat16
        checkpoints, too, because float16 has three more bits of precision, and keys seldom need the
        larger range. (Numbers out of range become NaN: `Slab.narrowed`.)
        """
        if self.form == "checkpoint":
            return self.weights.tensors["model.norm.weight"].dtype
        return mx.float16 if self.kv == "auto" and self.weights.are_narrow else mx.float32

    def attention_form(self, dtype: mx.Dtype) -> str:
        """Choose the implementation of attention, a key of `llama.ATTENTION`. With a student's own core
        files it is the formula, so that changes to it take effect."""
        c = self.config
        if self.attention == "plain" or foreign():
            return "formula"
        if device.is_batch_invariant() and self.form != "checkpoint":
            return "c"
        # MLX's fused attention is not used for soft caps and sinks: the formula applies them
        shapes = {c.heads(layer) for layer in range(c.writing)}
        if (
            device.has_gpu()
            and not c.cap
            and not c.sinks
            and all(fused_attention_check.is_right(*heads, dtype) for heads in shapes)
        ):
            return "kernel"
        return "formula"

    def fit(self, **options) -> Sizes:
        """Choose sizes that fit next to the weights, before the weights are read. Refuse weights or a slab
        that are too large."""
        self.check_room()
        free = None if self.free is None else self.free - self.nbytes
        return fit(self.config, self.kv_dtype.size, free, **options)

    def read_model(self, between: Callable[[float], None] = lambda share: None) -> Model:
        """Read all weights and build the model.

        `between`: called before each layer with the fraction of layers already read.
        """
        self.check_room()
        # The estimate does not include headers and padding to cache lines
        self.memory = Memory(self.nbytes + 4 * LINE * len(self.weights.tensors))
        c = self.config
        # While a matrix is being packed, it is in memory twice, so the largest matrices come first
        norm = self.norm("model.norm")
        table = self.linear("model.embed_tokens")
        head = None
        if self.ranks.rank == 0:
            head = table if c.tied else self.linear("lm_head")
        # Evaluate layer by layer, or the files' arrays and ours would all be in memory at once
        positions = [(*c.positions(i), c.heads(i).Dh) for i in range(c.layers)]
        kinds = list(dict.fromkeys(positions))
        layers = []
        for i, each in enumerate(positions):
            between(i / c.layers)
            layers.append(self.layer(i, kinds.index(each)))
        cap = partial(capped, cap=c.head_cap) if head and c.head_cap else None
        growth = Growth.for_config(*c.growth, c.H) if c.growth else None
        kinds = tuple(
            AttentionType.for_rope(*kind[:2], c.cap, kind[2], 0, growth, self.sinks.get(number, {}))
            for number, kind in enumerate(kinds)
        )
        inputs = self.layer_inputs() if c.embeddings else None
        mx.eval(norm, table, head, kinds, arrays(inputs))
        device.limit_cache()
        model = Model(
            config=c,
            layers=layers,
            norm=norm,
            table=table,
            head=chain(head, cap),
            kinds=kinds,
            ranks=self.ranks,
            choices=self.choices,
            layer_inputs=inputs,
            kv_dtype=self.kv_dtype,
            attention=self.attention_form(norm.weight.dtype),
            quantization=self.weights.quantization(self.config),
            arithmetic="int8" if self.rounds else "float",
        )
        del self.memory  # the matrices keep its arrays alive
        cost = counted(model)
        if self.form == "float32" and self.weights.are_narrow:
            cost = cost._replace(form=f"{cost.form}, widened")
        return replace(model, cost=cost)

    def layer(self, index: int, kind: int) -> Layer:
        if device.exiting.is_set():
            raise RuntimeError("the program is exiting")
        c = self.config
        name = f"model.layers.{index}."
        # Norms come before or after the two branches, or both
        norms = {place: self.norm(f"{name}{module}") for place, module in c.norms.items()}
        if index in c.convolved:
            return self.mixed(index, kind, norms, self.convolution(index), "conv.out_proj")
        if index in c.deltas:
            return self.mixed(index, kind, norms, self.delta_net(index), "linear_attn.out_proj")
        heads = c.heads(index)
        qk_norm = v_norm = gate = None
        if c.qk_norm:
            qk_norm = self.norm(f"{name}self_attn.q_norm")
        if c.qk_norm and heads.Hkv:
            k_norm = self.norm(f"{name}self_attn.k_norm")
            qk_norm = QKNorm(qk_norm, k_norm, c.H, c.qk_norm == "width")
        if c.v_norm and heads.Hkv:
            weight = mx.ones(heads.Dh, qk_norm.q.weight.dtype)
            v_norm = ValueNorm(Norm.from_weight(weight, c.norm_eps), heads)
        q, *kv = (f"{name}self_attn.{part}_proj" for part in "qkv")
        kv = [module for module in kv if not c.is_unused(module)]
        if c.gated:
            queries, gates = self.queries_and_gates(q)
            qkv = self.joined([queries, *map(self.part, kv)])
            gate = OutputGate(self.kept(gates))
        else:
            qkv = self.linear(q, *kv)
        # Each rank computes a partial sum of every branch
        summed = self.ranks.sum if self.ranks.size > 1 else None
        layer = Layer(
            slab_index=c.slab_index(index),
            kind=kind,
            heads=heads,
            attn_norm=chain(norms.get("attn_norm")),
            qkv=chain(qkv, v_norm),
            qk_norm=chain(qk_norm),
            gate=gate,
            out=chain(self.linear(f"{name}self_attn.o_proj"), summed, norms.get("attn_after")),
            mlp_norm=chain(norms.get("mlp_norm")),
            mlp=chain(self.mlp(f"{name}mlp."), summed, norms.get("mlp_after")),
            after=self.after(index) if c.scalars else None,
        )
        if c.sinks:
            sinks = self.tensor(f"{name}self_attn.sinks").astype(mx.float32)
            self.sinks.setdefault(kind, {})[layer.slab_index] = sinks
        mx.eval(arrays(layer))
        return layer

    def mixed(self, index: int, kind: int, norms: dict[str, Norm], mixer: Mixer, out: str) -> Layer:
        """Build a layer with a convolution or a delta net instead of attention."""
        name = f"model.layers.{index}."
        layer = Layer(
            kind=kind,
            attn_norm=chain(norms.get("attn_norm")),
            out=self.linear(f"{name}{out}"),
            mlp_norm=chain(norms.get("mlp_norm")),
            mlp=self.mlp(f"{name}mlp."),
            mixer=mixer,
        )
        mx.eval(arrays(layer))
        return layer

    def convolution(self, index: int) -> Convolution:
        name = f"model.layers.{index}.conv."
        taps = self.tensor(f"{name}conv.weight").reshape(self.config.D, -1)
        return Convolution(index, self.linear(f"{name}in_proj"), mx.contiguous(taps.T))

    def delta_net(self, index: int) -> DeltaNet:
        name = f"model.layers.{index}.linear_attn."
        heads = self.config.delta
        taps = self.tensor(f"{name}conv1d.weight").reshape(heads.inputs, -1)
        vectors = [self.tensor(f"{name}{vector}") for vector in ("A_log", "dt_bias")]
        parts = [self.part(f"{name}in_proj_{part}") for part in ("qkv", "a", "b")]
        order = None
        if self.config.values_tiled and heads.Hv > heads.Hk:
            order = mx.arange(heads.Hv).reshape(heads.Hk, -1).T.flatten()
            grouped = mx.argsort(order)
            inputs = input_rows(heads, grouped)
            taps, vectors = taps[inputs], [vector[grouped] for vector in vectors]
            chosen = (inputs, grouped, grouped)
            parts = [chosen_rows(*each) for each in zip(parts, chosen, strict=True)]
        weights = mx.concatenate([taps.T.flatten(), *vectors])
        return DeltaNet(
            index=sum(i < index for i in self.config.deltas),
            heads=heads,
            project=self.joined(parts),
            weights=weights.astype(mx.float32),
            z=self.linear(f"{name}in_proj_z"),
            norm=self.norm(f"{name}norm"),
            order=order,
            is_formula=self.attention_form(weights.dtype) != "c",
        )

    def queries_and_gates(self, module: str) -> tuple[Matrix, Matrix]:
        """Split q_proj into queries and gates. The file stores each head's queries before its gates."""
        c = self.config
        both = self.part(module)
        order = c.rope.order(c.Dh)
        queries, gates = (
            mx.array([2 * head * c.Dh + i for head in range(c.H) for i in rows])
            for rows in (order, range(c.Dh, 2 * c.Dh))
        )
        return chosen_rows(both, queries), chosen_rows(both, gates)

    def after(self, index: int) -> AddInput | Scaled:
        """Build the step that changes the residual stream after a layer."""
        name = f"model.layers.{index}."
        scalar = self.tensor(f"{name}layer_scalar")
        if not self.config.embeddings:
            return Scaled(scalar)
        gate, projection = (self.linear(f"{name}{module}") for module in LAYER_INPUT)
        norm = self.norm(f"{name}post_per_layer_input_norm")
        return AddInput(index, gate, projection, norm, scalar)

    def layer_inputs(self) -> LayerInputs:
        """Load the per-layer embeddings. Their factor is not folded into the table, whose scales would
        need more bits."""
        projection = self.linear("model.per_layer_model_projection")
        norm = self.norm("model.per_layer_projection_norm")
        table = self.linear("model.embed_tokens_per_layer")
        return LayerInputs(table, projection, norm, (self.config.embeddings / 2) ** 0.5)

    def norm(self, module: str) -> Norm:
        return Norm.from_weight(self.tensor(f"{module}.weight"), self.config.norm_eps)

    def mlp(self, name: str) -> Mlp | Experts | SharedExpert:
        if self.config.experts:
            stacks = f"{name}experts."
            experts = Experts(
                router=self.linear(f"{name}gate"),
                gate_up=self.linear(f"{stacks}gate_proj", f"{stacks}up_proj"),
                down=self.linear(f"{stacks}down_proj"),
                k=self.config.taken,
                whole_shares=self.config.whole_shares,
                choices=self.choices,
                limit=self.config.limit,
            )
            if not self.config.shared_expert:
                return experts
            shared = f"{name}shared_expert"
            gate_up = self.linear(f"{shared}.gate_proj", f"{shared}.up_proj")
            gate = self.kept(self.part(f"{shared}_gate")).embed(mx.array([0]))[0]
            return SharedExpert(experts, Mlp(gate_up, self.linear(f"{shared}.down_proj")), gate)
        gate_up = self.linear(f"{name}gate_proj", f"{name}up_proj")
        return Mlp(gate_up, self.linear(f"{name}down_proj"), self.config.gelu)

    def tensor(self, name: str) -> mx.array:
        """Return a tensor in the precision of the computation, multiplied by its factor (`Config.factor`)."""
        return self.times(self.load_tensor(name), name)

    def times(self, array: mx.array, name: str) -> mx.array:
        factor = self.config.factor(name)
        dtype = array.dtype if self.form == "checkpoint" else mx.float32
        is_added = self.config.norms_add and name.endswith("norm.weight")
        if is_added and "linear_attn" not in name:
            array = 1 + array.astype(mx.float32)
        if factor != 1:
            array = array.astype(mx.float32) * factor
        return array.astype(dtype)

    def load_tensor(self, name: str) -> mx.array:
        """Return a tensor as stored in the files. Each head of queries and keys is put in `Rope.order`."""
        return self.in_order(self.weights.read_tensor(name), name)

    def in_order(self, array: mx.array, name: str) -> mx.array:
        Dh = self.config.Dh
        order = self.config.rope.order(Dh)
        turns = name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")
        has_gates = self.config.gated and "q_proj" in name  # reordered in `queries_and_gates`
        if not turns or has_gates or order == sorted(order):
            return array
        heads = array.reshape(-1, Dh, *array.shape[1:])
        return heads[:, mx.array(order)].reshape(array.shape)

    def linear(self, *modules: str) -> Matrix | SideBySide:
        """Load a projection, or join several with the same input."""
        return self.joined([self.part(module) for module in modules])

    def joined(self, parts: list[Matrix]) -> Matrix | SideBySide:
        """Join projections of the same input: adjacent ones that are packed the same way become one."""
        alike = groupby(parts, key=lambda part: part.packing)
        matrices = tuple(self.kept(*each) for _, each in alike)
        return matrices[0] if len(matrices) == 1 else SideBySide(matrices)

    def kept(self, *parts: Matrix) -> Matrix:
        is_stack = parts[0].weight.ndim > 2 and device.is_batch_invariant()
        if (self.form == "packed" and parts[0].bits) or (self.form != "checkpoint" and is_stack):
            return packed(*parts, rounds=self.rounds, memory=self.memory)
        return joined(parts)

    def part(self, module: str) -> Matrix:
        """Load the matrix of a module, or this rank's shard of it."""
        name = f"{module}.weight"
        has = self.weights.tensors
        rows, columns = slice(None), slice(None)
        if self.ranks.size > 1:
            rows, columns = self.share.cut(module, self.config.Dh)
        bias = None
        # If columns are divided among ranks, their outputs are summed, so only rank 0 adds the bias
        if f"{module}.bias" in has and not (self.ranks.rank and columns.stop):
            bias = self.tensor(f"{module}.bias")[rows]
        if f"{module}.scales" in has:
            return self.quantized(module, bias, rows, columns)
        weight = cut_out(self.load_tensor(name), rows, columns)
        if self.form == "packed" and weight.dtype != mx.float32 and weight.shape[-1] >= LEAST:
            # The factor becomes a scale, because multiplied weights would need more bits
            scales = mx.full((*weight.shape[:-1], 1), self.config.factor(name), mx.float32)
            return Matrix(weight, bias, scales, bits=16, group=weight.shape[-1])
        return Matrix(self.times(weight, name), bias)

    def quantized(
        self,
        module: str,
        bias: mx.array | None,
        rows: slice,
        columns: slice,
    ) -> Matrix:
        """Load a quantized matrix. Keep it packed if the device can multiply it and no group is split."""
        name = f"{module}.weight"
        bits = self.weights.tensors[name].bits
        group = self.weights.tensors[name].group
        center = self.weights.tensors[name].center
        K = self.weights.tensors[name].shape[-1] * 32 // bits
        is_whole = columns.indices(K) == (0, K, 1) and self.config.factor(name) == 1
        if self.form == "packed" and is_whole and (blocks := self.weights.blocks_of(name)):
            *many, N, _ = self.weights.tensors[name].shape
            numbers = mx.arange(math.prod((*many, N)), dtype=mx.int32).reshape(*many, N, 1)
            numbers = self.in_order(numbers, name)[..., rows, :]
            return Matrix(numbers, bias, bits=bits, group=group, center=center, blocks=blocks)
        as_codes = self.form == "packed" and is_whole
        weight = self.in_order(self.weights.read_tensor(name, as_codes), name)
        scales = self.load_tensor(f"{module}.scales")
        offsets = None if center else self.load_tensor(f"{module}.biases")
        width = groups_of(scales, group) * group
        start, stop, _ = columns.indices(width)
        is_cut = start % group or stop % group
        if self.form != "packed" or self.config.factor(name) != 1 or stop - start < width:
            scales = widened(scales, group)
            offsets = None if center else widened(offsets, group)
        if self.form != "packed" or self.config.factor(name) != 1 or is_cut:
            scales = self.times(scales, name)
            offsets = None if center else self.times(offsets, name)
        is_unknown = self.form == "checkpoint" and group not in MLX_GROUPS
        if center and (self.form != "packed" or is_cut):
            offsets, center = scales * center, 0.0
        if self.form == "float32" or is_cut or is_unknown:
            weight = dequantized(weight, scales, offsets, group, bits)
            weight = weight.astype(mx.float16) if is_unknown else weight
            return Matrix(cut_out(weight, rows, columns), bias)
        words = groups = slice(None)
        if stop - start < width:
            words = slice(start * bits // 32, stop * bits // 32)
            groups = slice(start // group, stop // group)
        return Matrix(
            cut_out(weight, rows, words),
            bias,
            cut_out(scales, rows, groups),
            None if center else cut_out(offsets, rows, groups),
            bits,
            group,
            center=center,
        )


def input_rows(heads: Heads, order: mx.array) -> mx.array:
    """Return the row indices of a delta net's inputs, with the value heads in this order."""
    keys = mx.arange(2 * heads.Hk * heads.Dk)
    values = order[:, None] * heads.Dv + mx.arange(heads.Dv)
    return mx.concatenate([keys, len(keys) + values.flatten()])


def chosen_rows(matrix: Matrix, rows: mx.array) -> Matrix:
    bias = None if matrix.bias is None else matrix.bias[rows]
    return matrix._replace(bias=bias, **{name: each[rows] for name, each in matrix.arrays.items()})


def cut_out(matrix: mx.array, rows: slice, columns: slice) -> mx.array:
    """Return these rows and columns of a matrix. The weight of a norm is a vector and is not cut.

    Columns are copied, because a view would keep the entire matrix in memory. Rows are copied later,
    when they are joined with other matrices.
    """
    if matrix.ndim == 1:
        return matrix
    part = matrix[..., rows, columns]
    return part if part.shape[-1] == matrix.shape[-1] else mx.contiguous(part)

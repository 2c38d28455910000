"""The Transformer: encoder and decoder, their masks, shared embeddings, the output projection and the loss.

Architecture, argument order and the names of modules and parameters are those of the widely used PyTorch
implementation attention-is-all-you-need-pytorch, so a state_dict of one loads strictly into the other. No parameter
is changed for the fused ops: use_backend("reference") runs the same object by the plain formulas.

Differences, all on purpose: attention weights are computed only on request; a query that may attend to nothing gives 0
instead of the mean of all values; norm_first, activation and n_head_kv, off by default, vary the sublayers as
fastattn.nn describes.     Source: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.graphs.graphed_call import Padding, can_replay, graphs_of, round_up, round_up_length
from fastattn.masks import AttentionMask
from fastattn.masks._checks import check_token_ids
from fastattn.models.padding import PackedBatch, Packing, Unpadded, choose_packing
from fastattn.models.stacks import Decoder, Encoder, Position
from fastattn.nn.fusible import can_fuse
from fastattn.nn.kv_cache import DecoderCache, check_source, move_padding_to_end
from fastattn.nn.linear import linear
from fastattn.ops import _checks
from fastattn.ops._checks import check_arguments, check_choice, check_flags
from fastattn.ops.feed_forward import Activation
from fastattn.ops.linear_cross_entropy import SmoothOver, cross_entropy, loss_of_known_target

ScaleMode = Literal["emb", "prj", "none"]
Reduction = Literal["mean", "sum"]
REDUCTIONS = get_args(Reduction)


class FusedTransformer(nn.Module):
    """Sequence to sequence by attention alone. All arguments up to scale_emb_or_prj are the public implementation's.

    n_src_vocab, n_trg_vocab, src_pad_idx, trg_pad_idx: vocabulary sizes, and the index of padding in each.
    d_model: width of the stream and of the embeddings, as d_word_vec, which must be the same where it is given.
    d_inner: width of the feed-forward's hidden layer.
    n_layers: of the encoder, and as many of the decoder.  n_head, d_k, d_v: attention heads and their widths.
    dropout: after the embeddings and after every sublayer.     n_position: rows of the tables of positions.
    trg_emb_prj_weight_sharing: target embedding and output projection are one weight (section 3.4), and then
        scale_emb_or_prj chooses what is scaled: "emb" multiplies embeddings by sqrt(d_model), "prj" multiplies logits
        by 1 / sqrt(d_model), "none" neither. Without sharing it has no effect.
    emb_src_trg_weight_sharing: source and target embedding are one weight; for a joint vocabulary.
    attn_dropout: on attention weights. 0.1 whatever dropout is, as in the public implementation.
    position: "sine", whose tables grow in eager mode for longer sequences, or "learned", see PositionalEncoding.
    norm_first, activation, n_head_kv: see PendingResidual, PositionwiseFeedForward, MultiHeadAttention in fastattn.nn.
    pack_padding: True drops padding before both stacks, so that only real tokens are computed. Their results stay the
        same; logits of padding are 0. It costs a gather and, on a GPU, one wait for the device a batch; it is faster
        from about 25 % padding on. A model on a GPU then also accepts tokens on the CPU: they are packed there and
        copied, without a wait. With None, the default, padding is dropped on a CPU from 25 % on, except in small
        batches: all of it in ``loss``, that of the source in forward and decoding.
    graphs: True trains by CUDA graphs: forward and backward of ``loss``, or of both stacks where the logits are
        needed, are one launch each, and one node of autograd, so that the training loop stays as it is. A shape runs
        eagerly twice, is captured, and replayed from then on: lengths are padded to a multiple of 8, the number of
        sentences by up to an eighth. With pack_padding=True the tokens of each side are rounded up instead, and only
        ``loss`` has graphs. What cannot be replayed runs eagerly; ``fastattn.explain(model)`` says why. None,
        the default, and CPUs: no graphs. So does the environment variable FASTATTN_GRAPHS=0.
    backend: of every op. With None, use_backend, FASTATTN_BACKEND or each op's own order decides.
    device, dtype: of parameters and buffers, as in torch.nn.
    TypeError or ValueError naming an argument that makes no model.

    Children may be wrapped, replaced, hooked, parametrised, pruned or quantised. Such a child is called, and the ops
    fuse the rest; ``fastattn.explain(model)`` lists these children. Decoding by steps calls them too, but no dropout of
    the attention weights, and no hook of the decoder or of the model.

    Every weight matrix starts from Glorot's uniform distribution. Parameters may stay in float32 under
    torch.autocast: matrix products and attention then run in its dtype, the residual stream and its norms in float32.
    Compiled by torch.compile and exported by torch.export; torch.jit and the old ONNX exporter are not supported.
    """

    fused_children = ("trg_word_prj",)

    def __init__(
        self,
        n_src_vocab: int,
        n_trg_vocab: int,
        src_pad_idx: int,
        trg_pad_idx: int,
        d_word_vec: int | None = None,
        d_model: int = 512,
        d_inner: int = 2048,
        n_layers: int = 6,
        n_head: int = 8,
        d_k: int = 64,
        d_v: int = 64,
        dropout: float = 0.1,
        n_position: int = 200,
        trg_emb_prj_weight_sharing: bool = True,
        emb_src_trg_weight_sharing: bool = True,
        scale_emb_or_prj: ScaleMode = "prj",
        *,
        attn_dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "relu",
        n_head_kv: int | None = None,
        position: Position = "sine",
        pack_padding: bool | None = None,
        graphs: bool | None = None,
        backend: Backend | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(n_src_vocab=n_src_vocab, n_trg_vocab=n_trg_vocab, d_model=d_model)  # the stacks check others
        check_flags(trg_emb_prj_weight_sharing=trg_emb_prj_weight_sharing)
        check_flags(emb_src_trg_weight_sharing=emb_src_trg_weight_sharing)
        check_flags(**{k: v for k, v in (("pack_padding", pack_padding), ("graphs", graphs)) if v is not None})
        pads = (("src_pad_idx", src_pad_idx, n_src_vocab), ("trg_pad_idx", trg_pad_idx, n_trg_vocab))
        for name, index, vocabulary in pads:
            if not isinstance(index, Integral) or isinstance(index, bool) or not 0 <= index < vocabulary:
                raise ValueError(f"{name} must be an integer from 0 to {vocabulary - 1}, a token, got {index!r}")
        check_choice("scale_emb_or_prj", scale_emb_or_prj, get_args(ScaleMode))
        if emb_src_trg_weight_sharing and n_src_vocab > n_trg_vocab:
            raise ValueError(
                f"a shared embedding has n_trg_vocab={n_trg_vocab} rows, too few for n_src_vocab={n_src_vocab}; "
                "use a joint vocabulary or emb_src_trg_weight_sharing=False"
            )
        self.src_pad_idx, self.trg_pad_idx, self.d_model = src_pad_idx, trg_pad_idx, d_model
        self.pack_padding, self.graphs = pack_padding, graphs
        self.scale_prj = trg_emb_prj_weight_sharing and scale_emb_or_prj == "prj"
        sizes = d_model if d_word_vec is None else d_word_vec, n_layers, n_head, d_k, d_v, d_model, d_inner
        scale_emb = trg_emb_prj_weight_sharing and scale_emb_or_prj == "emb"
        stack: dict[str, Any] = {"dropout": dropout, "n_position": n_position, "scale_emb": scale_emb}
        stack |= {"attn_dropout": attn_dropout, "norm_first": norm_first, "activation": activation}
        stack |= {"n_head_kv": n_head_kv, "position": position, "backend": backend, "device": device, "dtype": dtype}
        self.encoder = Encoder(n_src_vocab, *sizes, src_pad_idx, **stack)
        self.decoder = Decoder(n_trg_vocab, *sizes, trg_pad_idx, **stack)
        self.trg_word_prj = nn.Linear(d_model, n_trg_vocab, bias=False, device=device, dtype=dtype)
        self._start_from_glorot()
        shared = [self.trg_word_prj] if trg_emb_prj_weight_sharing else []
        self._share(shared + ([self.encoder.src_word_emb] if emb_src_trg_weight_sharing else []))

    def _start_from_glorot(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                # xavier_uniform_, also of a table of positions (1, n_position, d_model), which may be a DTensor
                bound = math.sqrt(3) * math.sqrt(2 / sum(parameter.shape[-2:]))
                nn.init.uniform_(parameter, -bound, bound)

    def reset_parameters(self) -> None:
        """Initialise parameters and positions again, as is needed after to_empty() of a model on the meta device."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self._start_from_glorot()

    def _sharing(self) -> list[nn.Module]:
        """The modules whose weight is the target embedding's own."""
        weight = self.decoder.trg_word_emb._parameters.get("weight")
        others = (self.trg_word_prj, self.encoder.src_word_emb)
        return [module for module in others if weight is not None and module._parameters.get("weight") is weight]

    def _share(self, modules: list[nn.Module]) -> None:
        for module in modules:
            module.weight = self.decoder.trg_word_emb.weight

    # Calls that make new parameters, such as to_empty(), make one for each module. A shared weight stays shared.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedTransformer:
        sharing = self._sharing()
        super()._apply(fn, recurse)
        self._share(sharing)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        sharing = self._sharing()
        keys = super().load_state_dict(state_dict, strict, assign)
        self._share(sharing)
        return keys

    def forward(
        self,
        src_seq: Tensor,
        trg_seq: Tensor,
        gold: Tensor | None = None,
        label_smoothing: float = 0.0,
        *,
        smooth_over: SmoothOver = "all",
        reduction: Reduction = "mean",
    ) -> Tensor:
        """src_seq: integer (B, Ls); trg_seq: integer (B, Lt), the target without its last token.

        Returns logits (B * Lt, n_trg_vocab): row b * Lt + t scores the token that follows trg_seq[b, t].
        With gold it returns ``loss`` of the same arguments instead. So DistributedDataParallel and fully_shard, which
        act on a call of the model, act on the loss too.
        """
        if gold is not None:
            return self.loss(src_seq, trg_seq, gold, label_smoothing, smooth_over=smooth_over, reduction=reduction)
        if (label_smoothing, smooth_over, reduction) != (0.0, "all", "mean"):
            raise ValueError("label_smoothing, smooth_over and reduction need gold")
        check_batch(src_seq, trg_seq)
        packing = choose_packing(self, src_seq)
        if packing.target or not self._uses_graphs():
            dec_output, unpadded = self.decoder_output(src_seq, trg_seq, packing)
        else:
            batch, unpadded = (src_seq, trg_seq), None
            self.grow(*batch)
            dec_output = graphs_of(self)(self, FusedTransformer._stacks, batch, {}, self._graph_shapes)
        logits = self.project(dec_output)
        return (logits if unpadded is None else unpadded.restore_padding(logits)).flatten(0, 1)

    def loss(
        self,
        src_seq: Tensor,
        trg_seq: Tensor,
        gold: Tensor,
        label_smoothing: float = 0.0,
        *,
        smooth_over: SmoothOver = "all",
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Cross-entropy of forward(src_seq, trg_seq) and gold, float32 (). The logits are never stored as a whole.

        gold: integer (B, Lt) or (B * Lt,), the token that follows each of trg_seq; where it is padding it is ignored,
            and so is, with pack_padding, what follows padding in trg_seq.
        label_smoothing, smooth_over: as in ``linear_cross_entropy``: torch's smoothing, or with "others" the public
            implementation's.     reduction: "mean" over the tokens that are not ignored, or "sum".
        As torch's, a mean is NaN where every token is ignored.
        """
        check_batch(src_seq, trg_seq)
        check_gold(gold, trg_seq)
        check_choice("reduction", reduction, REDUCTIONS)
        _checks.check_indices("gold", gold, "trg_seq", trg_seq)
        if can_fuse(self.trg_word_prj):
            _checks.check_range("gold", gold, self.trg_word_prj.out_features, "a row of the output projection")
        gold = gold if gold.dim() == 2 else gold.reshape(trg_seq.shape)
        options: tuple[Any, ...] = label_smoothing, smooth_over, reduction
        if self._uses_graphs():
            _checks.check_number("label_smoothing", label_smoothing)
            batch, padding = self.graph_batch(src_seq, trg_seq, gold)
            call = FusedTransformer._padded_loss if padding else FusedTransformer.packed_loss
            return graphs_of(self)(self, call, (*batch, float(label_smoothing), *options[1:]), {}, padding)
        packing = choose_packing(self, src_seq, trg_seq, gold)
        if packing.target:
            return self.packed_loss(PackedBatch.of(self, src_seq, trg_seq, gold)[0], *options)
        return self._loss_of(self.decoder_output(src_seq, trg_seq, packing)[0], gold, *options)

    def _padded_loss(self, src_seq: Tensor, trg_seq: Tensor, gold: Tensor, *options: Any) -> Tensor:
        return self._loss_of(self._stacks(src_seq, trg_seq), gold, *options)

    def packed_loss(self, batch: PackedBatch, *options: Any, **named: Any) -> Tensor:
        """`loss`, of a batch with gold. options: label_smoothing, smooth_over, reduction.

        On a GPU it reads no value on the host, so a CUDA graph can repeat it."""
        return self._loss_of(self._packed_output(batch), batch.parts()[8], *options, **named)

    def _loss_of(
        self,
        dec_output: Tensor,
        gold: Tensor,
        label_smoothing: float = 0.0,
        smooth_over: SmoothOver = "all",
        reduction: Reduction = "mean",
    ) -> Tensor:
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "smooth_over": smooth_over}
        options |= {"ignore_index": self.trg_pad_idx, "reduction": reduction}
        projection = self.trg_word_prj
        if not can_fuse(projection):
            return cross_entropy(self.project(dec_output), gold, **options)
        options |= {"logit_scale": self.d_model**-0.5 if self.scale_prj else 1.0, "backend": self.decoder.backend}
        return loss_of_known_target(dec_output, projection.weight, gold, projection.bias, **options)

    def _uses_graphs(self) -> bool:
        return bool(self.graphs) and not torch.compiler.is_compiling()

    def graph_batch(self, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> tuple[tuple[Any, ...], Any]:
        """The batch that graphs of the loss read, and how it is padded: all of it, or (PackedBatch,) and None."""
        self.grow(src_seq, trg_seq)
        if not choose_packing(self, src_seq, trg_seq, gold).target:
            return (src_seq, trg_seq, gold), self._graph_shapes
        rounded = can_replay(next(self.parameters()).device)
        return (PackedBatch.of(self, src_seq, trg_seq, gold, rounded)[0],), None

    def grow(self, src_seq: Tensor, trg_seq: Tensor) -> None:
        """Make the positions of a batch, or raise ValueError: before graphs compare what they read."""
        self.encoder.grow(src_seq.shape[1])
        self.decoder.grow(trg_seq.shape[1])

    def _stacks(self, src_seq: Tensor, trg_seq: Tensor) -> Tensor:
        return self.decoder_output(src_seq, trg_seq, choose_packing(self, src_seq))[0]

    def _graph_shapes(self, tensors: Sequence[Tensor]) -> Padding:
        """Of src_seq, trg_seq and, if the result is the loss, gold."""
        (src_seq, trg_seq), pads = tensors[:2], (self.src_pad_idx, self.trg_pad_idx, self.trg_pad_idx)
        rows, sizes = round_up(len(src_seq)), []
        for length, stack in ((src_seq.shape[1], self.encoder), (trg_seq.shape[1], self.decoder)):
            sizes.append((rows, min(round_up_length(length), stack.position_enc.longest())))
        if len(tensors) == 2:
            return Padding(sizes, pads[:2], ((*trg_seq.shape, self.d_model),))
        return Padding([*sizes, sizes[1]], pads, ((),))

    def decoder_output(self, src_seq: Tensor, trg_seq: Tensor, packing: Packing) -> tuple[Tensor, Unpadded | None]:
        """The decoder's output (B, Lt, d_model) and None. Where padding of the target is dropped: the output of the T
        real tokens of trg_seq, (1, T, d_model), and the Unpadded that restores the padding."""
        if packing.target:
            batch, unpadded = PackedBatch.of(self, src_seq, trg_seq)
            return self._packed_output(batch), unpadded
        src_mask, trg_mask = self.src_mask(src_seq), self.trg_mask(trg_seq)
        enc_output = self.encode(src_seq, src_mask, packing)
        return self.decoder(trg_seq, trg_mask, enc_output, src_mask)[0], None

    def _packed_output(self, batch: PackedBatch) -> Tensor:
        """The decoder's output (1, Tt, d_model)."""
        src, src_position, src_queries, src_keys, trg, trg_position, trg_queries, trg_keys, _ = batch.parts()
        src_mask = AttentionMask(cu_seqlens_q=src_queries, cu_seqlens_k=src_keys)
        trg_mask = AttentionMask(cu_seqlens_q=trg_queries, cu_seqlens_k=trg_keys, is_causal=True)
        trg_src_mask = AttentionMask(cu_seqlens_q=trg_queries, cu_seqlens_k=src_keys)
        enc_output, *_ = self.encoder(src, src_mask, position=src_position)
        return self.decoder(trg, trg_mask, enc_output, trg_src_mask, position=trg_position)[0]

    def encode(self, src_seq: Tensor, src_mask: AttentionMask, packing: Packing) -> Tensor:
        """The encoder's output (B, Ls, d_model). Where padding is dropped, it is 0."""
        if not packing.source:
            return self.encoder(src_seq, src_mask)[0]
        self.encoder.grow(src_seq.size(1))
        (src,) = Unpadded.of((src_seq, self.src_pad_idx), device=src_seq.device)
        mask = AttentionMask(cu_seqlens_q=src.cu_seqlens)
        return src.restore_padding(self.encoder(src.tokens, mask, position=src.position)[0])

    def start_decoding(self, src_seq: Tensor, rows: int, capacity: int) -> DecoderCache:
        """Encode src_seq, (B, Ls), for `next_logits`: a cache of `rows` beams a sentence, `capacity` tokens long.

        ValueError where a sentence has no token, and where source or target have more than there can be positions.
        """
        check_token_ids("src_seq", src_seq)
        _checks.check_indices("src_seq", src_seq, "the model", next(self.parameters()))
        real = src_seq != self.src_pad_idx
        check_source(real)
        self.decoder.grow(capacity, f"max_len={capacity}")
        enc_output = self.encode(src_seq, self.src_mask(src_seq), choose_packing(self, src_seq))
        memory = self.decoder.memory(*move_padding_to_end(enc_output, real))
        return DecoderCache(len(src_seq), rows, capacity, src_seq.device, (memory,))

    def next_logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (B, W, n_trg_vocab) of what follows one new token a beam, integer (B, W): see Decoder.step."""
        return self.project(self.decoder.step(tokens, cache), cache)

    # Each mask is built once a batch. All layers share it, and the layouts that it prepares.

    def src_mask(self, src_seq: Tensor) -> AttentionMask:
        """Real source tokens are visible, to the encoder and to the decoder's attention to it. src_seq: (B, Ls)."""
        return AttentionMask(key_padding=src_seq != self.src_pad_idx)

    def trg_mask(self, trg_seq: Tensor) -> AttentionMask:
        """Real tokens up to itself are visible to a target token. trg_seq: (B, Lt)."""
        return AttentionMask(key_padding=trg_seq != self.trg_pad_idx, is_causal=True)

    def project(self, dec_output: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Logits (..., n_trg_vocab) of the decoder's output (..., d_model), scaled as scale_emb_or_prj sets.

        cache: of a step of decoding, by the weights that it keeps.
        """
        projection, backend = self.trg_word_prj, self.decoder.backend
        fuses = can_fuse(projection)
        # Without a bias its d_model inputs are scaled instead of the n_trg_vocab logits.
        scales_input = fuses and projection.bias is None
        x = self.scaled(dec_output) if scales_input else dec_output
        if cache is not None:
            logits = cache.linear(projection, x, backend)
        else:
            logits = linear(projection, x, backend, fuses)
        return logits if scales_input else self.scaled(logits)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.d_model**-0.5 if self.scale_prj else x

    def extra_repr(self) -> str:
        return f"src_pad_idx={self.src_pad_idx}, trg_pad_idx={self.trg_pad_idx}, scale_prj={self.scale_prj}"


def check_batch(src_seq: Tensor, trg_seq: Tensor) -> None:
    """Raise unless these are tensors (B, Ls) and (B, Lt). The stacks check the tokens' dtypes, lengths and values."""
    check_token_ids("src_seq", src_seq)
    check_token_ids("trg_seq", trg_seq)
    if src_seq.shape[0] != trg_seq.shape[0]:  # len() of a tensor is a constant to torch.export
        raise ValueError(f"src_seq holds {src_seq.shape[0]} sequences and trg_seq {trg_seq.shape[0]}, expected as many")


def check_gold(gold: object, trg_seq: Tensor) -> None:
    """Raise unless gold is a tensor (B, Lt) or (B * Lt,)."""
    if not isinstance(gold, Tensor):
        raise TypeError(f"gold must be a Tensor, got {type(gold).__name__}")
    if gold.shape not in (trg_seq.shape, (trg_seq.numel(),)):
        expected = f"{tuple(trg_seq.shape)} as trg_seq, or {(trg_seq.numel(),)}"
        raise ValueError(f"gold has shape {tuple(gold.shape)}, expected {expected}")

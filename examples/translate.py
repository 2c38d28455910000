"""Translates with a model that train_translation.py trained: `python examples/translate.py --model RUN "a sentence"`.

RUN is the folder of a run, or one of its files. Without sentences it translates the lines of `--input FILE`, or of
standard input, or asks for them. `--export FOLDER` writes the model for CTranslate2, which translates with
`--model FOLDER --engine ctranslate2`. `--plot FILE` draws which source tokens each token of a translation attended to,
`--plot-heads FILE` what each head of each layer attended to. Each input line gives one output line, a blank line a
blank one; with `--n-best N` it gives N lines.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import CommandError, command, lines_of, new_parser, positive, run_command, usable_device, writing
from torch import Tensor
from tqdm import tqdm
from translation.checkpoint import load_model
from translation.decoding import Engine, Translation, encode_source, export, translate
from translation.tokens import BOS, UNKNOWN, Tokenizer

from fastattn import FusedTransformer

MAX_LABELS = 30  # of a side of a head's picture: more are not legible


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("sentences", nargs="*", help="sentences to translate")
    parser.add_argument("--model", type=Path, required=True, help="folder of a run, or a file of it")
    parser.add_argument("--input", help="file with one sentence per line, plain or .gz; - for standard input")
    parser.add_argument("--beam", type=positive, help="hypotheses kept; 1 is greedy (default: the run's --beam)")
    parser.add_argument("--n-best", type=positive, default=1, help="translations of each sentence, with their scores")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", choices=("fastattn", "ctranslate2"), default="fastattn", help="what translates")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the model for --engine ctranslate2")
    parser.add_argument("--quantization", metavar="TYPE", help="of the exported weights: int8, int16, float16, ..")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture of the first sentence's attention")
    parser.add_argument("--plot-heads", type=Path, metavar="FILE", help="the same of each head of each layer")
    options = parser.parse_args(arguments)
    plots = options.plot or options.plot_heads
    if options.sentences and options.input:
        parser.error("give sentences or --input, not both")
    if options.export and (options.sentences or options.input or plots or options.engine != "fastattn"):
        parser.error("--export only writes a folder: leave out sentences, --input, plots and --engine")
    if options.quantization and not options.export:
        parser.error("--quantization needs --export")
    if options.engine == "ctranslate2" and plots:
        parser.error("a plot needs --engine fastattn: CTranslate2 returns no attention")
    return options


def model_file(path: Path) -> Path:
    """A file, or that of a run's folder; of a run that was stopped the best weights so far, which it says on stderr."""
    if not path.is_dir():
        return path
    name = next((name for name in ("model.pt", "best.pt", "last.pt") if (path / name).exists()), "model.pt")
    if name != "model.pt":
        print(f"{path}: the run was stopped (--resume ends it): translating with its {name}", file=sys.stderr)
    return path / name


@torch.no_grad()
def attention_weights(model: FusedTransformer, source: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Self-attention of the encoder and the decoder, and cross-attention: (layers, heads, queries, keys).

    As queries the decoder's tokens are what it wrote, ids and EOS; as keys what it had read, BOS and ids.
    """
    mask = model.src_mask(source)
    target = torch.tensor([[BOS, *ids]], device=source.device)
    enc_output, encoder = model.encoder(source, mask, return_attns=True)
    _, decoder, cross = model.decoder(target, model.trg_mask(target), enc_output, mask, return_attns=True)
    return torch.cat(encoder).cpu(), torch.cat(decoder).cpu(), torch.cat(cross).cpu()


def show(axes: Any, weights: Tensor, rows: Sequence[str], columns: Sequence[str], **style: Any) -> Any:
    axes.set_xticks(range(len(columns)), columns, rotation=90 if max(map(len, columns)) > 1 else 0, **style)
    axes.set_yticks(range(len(rows)), rows, **style)
    return axes.imshow(weights.numpy(), cmap="Blues", vmin=0, aspect="auto")


def draw_mean(figure: Any, weights: Sequence[Tensor], source: list[str], written: list[str]) -> None:
    width, height = (1.5 + 0.28 * len(labels) for labels in (source, written))
    figure.set_size_inches(max(width, 4) + 1, max(height, 3))
    axes = figure.subplots()
    image = show(axes, weights[2].mean((0, 1)), written, source)
    axes.set(title="Cross-attention, mean over layers and heads", xlabel="source", ylabel="translation")
    figure.colorbar(image, ax=axes, label="weight")


def draw_heads(figure: Any, weights: Sequence[Tensor], source: list[str], written: list[str]) -> None:
    """A grid of layers x heads for each kind of attention. The number is that of the tokens which a query attends to: e
    to the power of the entropy of its weights, mean over queries."""
    layers, heads = weights[0].shape[:2]
    side = 0.5 + 0.1 * min(max(len(source), len(written)), MAX_LABELS)
    figure.set_size_inches(heads * side + 0.5, 3 * (layers * (side + 0.2) + 0.6))
    kinds = {
        "Encoder self-attention": (source, source),
        "Decoder self-attention: what is written (rows), and before it": (written, ["start", *written[:-1]]),
        "Cross-attention: what is written (rows), and the source": (written, source),
    }
    for part, (name, sides), kind in zip(figure.subfigures(3), kinds.items(), weights, strict=True):
        part.suptitle(name)
        grid = part.subplots(layers, heads, sharex=True, sharey=True, squeeze=False)
        rows, columns = (labels if len(labels) <= MAX_LABELS else [""] * len(labels) for labels in sides)
        for (layer, head), axes in np.ndenumerate(grid):
            show(axes, kind[layer, head], rows, columns, size=6)
            seen = torch.special.entr(kind[layer, head]).sum(-1).exp().mean()
            axes.set_title(f"layer {layer + 1} head {head + 1}: {seen:.1f} tokens", size=8)


def draw(
    plots: dict[Any, Path | None], model: FusedTransformer, tokenizer: Tokenizer, source: list[int], ids: Sequence[int]
) -> None:
    """Draws the attention of one translation, with its tokens as labels, to a file for each kind of plot."""
    from matplotlib.figure import Figure

    device = next(model.parameters()).device
    weights = attention_weights(model, torch.tensor([source], device=device), ids)
    labels = [[*(tokenizer.decode([i]) for i in part), "end"] for part in (source[:-1], ids)]
    for plot, path in plots.items():
        if path:
            plot(figure := Figure(layout="constrained"), weights, *labels)
            with writing(path):
                figure.savefig(path, dpi=100)
            print(f"wrote {path}", file=sys.stderr)


def format_translations(found: Sequence[Translation], n_best: int) -> str:
    """One line per translation; with the scores where there are several. Of a blank text n_best blank lines."""
    if n_best == 1:
        return found[0].text.replace("\n", " ")
    lines = [f"{t.score:.4f}\t" + t.text.replace("\n", " ") for t in found if t.score is not None]
    return "\n".join(lines or [""] * n_best)


def run(options: argparse.Namespace) -> None:
    if options.engine == "ctranslate2":
        model = Engine(options.model, options.device)
        tokenizer, settings = model.tokenizer, model.settings
    else:
        model, tokenizer, settings = load_model(model_file(options.model), options.device)
    settings = dataclasses.replace(settings, beam=options.beam or max(settings.beam, options.n_best))
    if options.n_best > settings.beam:
        raise CommandError(f"--n-best {options.n_best} needs a beam at least as wide, got --beam {settings.beam}")
    if options.export:
        export(options.export, model, tokenizer, settings, options.quantization)
        print(f"wrote {options.export}; translate with it: --model {options.export} --engine ctranslate2")
        return

    def answer(texts: Sequence[str], show_progress: bool = False) -> None:
        texts = [text.lower() if settings.lowercase else text for text in texts]
        real = [i for i, text in enumerate(texts) if text.strip()]
        encoded = tokenizer.encode([texts[i] for i in real])
        if cut := sum(len(ids) >= settings.max_length for ids in encoded):
            print(f"{cut} of {len(texts)} sentences are cut to {settings.max_length} tokens", file=sys.stderr)
        if unknown := sum(UNKNOWN in ids for ids in encoded):
            print(f"{unknown} of {len(texts)} sentences hold characters that the model does not know", file=sys.stderr)
        with tqdm(total=len(real), unit="sentence", disable=not show_progress) as bar:
            found = translate(model, tokenizer, texts, settings, options.n_best, bar.update)
        with writing("standard output"):
            print("".join(format_translations(each, options.n_best) + "\n" for each in found), end="", flush=True)
        plots = {draw_mean: options.plot, draw_heads: options.plot_heads}
        if real and any(plots.values()):
            source = encode_source(tokenizer, texts[real[0]], settings.max_length)
            draw(plots, model, tokenizer, source, found[real[0]][0].ids)

    if options.sentences:
        answer(options.sentences)
    elif options.input is None and sys.stdin.isatty():
        try:
            while True:
                answer([input("> ")])
        except (EOFError, KeyboardInterrupt):
            print()
    else:
        from_stdin = options.input in (None, "-")
        answer(list(lines_of(sys.stdin.buffer if from_stdin else Path(options.input))), show_progress=True)


main = command(parse_arguments, run)

if __name__ == "__main__":
    run_command(main)

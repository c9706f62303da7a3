"""Train a recommender-style model, then make its embedding table sparse and int8: size and accuracy before and after.

    python scripts/prune_embeddings.py

The model tells from which document a snippet of text comes: hashed n-grams of characters, an EmbeddingBag over them, a small MLP. The
documents are the topics of the documentation inside CPython, or the files below ``--data``, or sixteen parts of one file. Every fifth
snippet's length of each document is held out. The last line of standard output is one JSON record.
"""

import argparse
import copy
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

from gradcomp.data import DataNormSparsifier, QuantizedEmbeddingBag, post_training_sparse_quantize
from gradcomp.data.masks import read_masks, write_masks


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is out of range ends with a message that names it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them, instead of the bundled documentation")
    add("--levels", type=float, nargs="+", default=[0.5, 0.8, 0.95], help="shares of the table to leave out")
    add("--block", type=int, nargs=2, default=[1, 1], metavar=("ROWS", "COLUMNS"), help="shape of what is left out together")
    add("--buckets", type=int, default=50_000, help="rows of the table")
    add("--dim", type=int, default=32, help="columns of the table")
    add("--ngram", type=int, default=4, help="characters an n-gram")
    add("--snippet", type=int, default=96, help="characters a snippet")
    add("--steps", type=int, default=400)
    add("--batch", type=int, default=64)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("reports/embeddings"), help="folder for the saved tables and the picture")
    args = parser.parse_args(argv)
    for level in args.levels:
        if not 0 <= level < 1:
            parser.error(f"--levels must be in [0, 1), got {level}")
    for field, low in (("buckets", 16), ("dim", 1), ("ngram", 1), ("snippet", 2), ("steps", 1), ("batch", 1)):
        if getattr(args, field) < low:
            parser.error(f"--{field} must be at least {low}, got {getattr(args, field)}")
    if min(args.block) < 1 or args.snippet <= args.ngram:
        parser.error(f"--block must be two numbers >= 1 and --snippet above --ngram, got {args.block}, {args.snippet}, {args.ngram}")
    if args.data is not None and not args.data.exists():
        parser.error(f"--data must be a file or a folder, {args.data} does not exist")
    return args


def documents(path: Path | None, snippet: int) -> list[bytes]:
    """Texts that are long enough to hold out some snippets of: the classes."""
    if path is None:
        from pydoc_data.topics import topics

        texts = [topics[key].encode() for key in sorted(topics)]
    elif path.is_dir():
        texts = [file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()]
    else:
        text = path.read_bytes()
        texts = [text[len(text) * part // 16 : len(text) * (part + 1) // 16] for part in range(16)]
    return [text for text in texts if len(text) >= 20 * snippet]


def ngrams(text: bytes, args: argparse.Namespace) -> np.ndarray:
    """The bucket of every n-gram of a text: int64 [len - ngram + 1]."""
    return np.array([zlib.crc32(text[at : at + args.ngram]) % args.buckets for at in range(len(text) - args.ngram + 1)])


class SnippetModel(nn.Module):
    """An EmbeddingBag over n-grams, and an MLP."""

    def __init__(self, buckets: int, dim: int, classes: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(buckets, dim, mode="mean")
        nn.init.normal_(self.table.weight, std=0.01)  # rows that are never seen stay small, and go first
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Int64 [batch, n-grams] -> logits [batch, classes]."""
        return self.mlp(self.table(ids))


class Snippets:
    """Snippets of the documents, as buckets of n-grams, with the document they come from."""

    def __init__(self, texts: list[bytes], args: argparse.Namespace) -> None:
        self.grams = [ngrams(text, args) for text in texts]
        self.length = args.snippet - args.ngram + 1
        self.block = 5 * args.snippet  # four fifths to train on, the last one held out
        self.blocks = [len(grams) // self.block for grams in self.grams]

    def _at(self, document: int, start: int) -> np.ndarray:
        return self.grams[document][start : start + self.length]

    def batch(self, size: int, generator: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random snippets of what is not held out."""
        labels = generator.integers(len(self.grams), size=size)
        starts = [generator.integers(self.blocks[label]) * self.block + generator.integers(3 * self.block // 5 + 1) for label in labels]
        rows = [self._at(label, start) for label, start in zip(labels, starts)]
        return torch.from_numpy(np.stack(rows)), torch.from_numpy(labels)

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to 20 of the snippets that are held out of each document, evenly spaced."""
        rows, labels = [], []
        for label, blocks in enumerate(self.blocks):
            for block in np.unique(np.linspace(0, blocks - 1, 20).astype(int)):
                rows.append(self._at(label, block * self.block + 4 * self.block // 5))
                labels.append(label)
        return torch.from_numpy(np.stack(rows)), torch.tensor(labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Share of the snippets whose document is found."""
    with torch.no_grad():
        return float((model(batch[0]).argmax(1) == batch[1]).float().mean())


def save_table(table: QuantizedEmbeddingBag, folder: Path) -> int:
    """Write a sparse int8 table: its mask, the values that are not zero, the scales. Returns the bytes of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = table.int8 != 0
    write_masks(folder / "mask", {"table": mask})
    torch.save({"values": table.int8[mask], "scales": table.scales.half()}, folder / "values")
    return sum(file.stat().st_size for file in (folder / "mask", folder / "values"))


def load_table(folder: Path, mode: str) -> QuantizedEmbeddingBag:
    """Read what :func:`save_table` wrote."""
    mask = read_masks(folder / "mask")["table"]
    saved = torch.load(folder / "values", weights_only=True)
    int8 = torch.zeros(mask.shape, dtype=torch.int8)
    int8[mask] = saved["values"]
    return QuantizedEmbeddingBag(int8, saved["scales"].float(), mode=mode)


def picture(masks: dict[str, torch.Tensor], path: Path) -> None:
    """Which elements of the first rows stay, at each level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(masks), figsize=(2.6 * len(masks), 6), squeeze=False, layout="constrained")
    for axis, (name, mask) in zip(axes[0], masks.items()):
        axis.imshow(mask[:128].numpy(), aspect="auto", cmap="Greys", interpolation="nearest")
        axis.set(title=name, xlabel="column", ylabel="row of the table")
    figure.suptitle("what stays (black) of the first 128 rows")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def train(model: SnippetModel, snippets: Snippets, args: argparse.Namespace) -> None:
    """Adam, with weight decay on what is seen."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = np.random.default_rng(args.seed)
    for _ in tqdm(range(args.steps), desc="training", file=sys.stderr, mininterval=1):
        ids, labels = snippets.batch(args.batch, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()


def main(argv: list[str] | None = None) -> None:
    """Train, prune, print."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    texts = documents(args.data, args.snippet)
    if len(texts) < 2:
        raise SystemExit(f"--data must hold at least two documents of {20 * args.snippet} characters, got {len(texts)}")
    snippets = Snippets(texts, args)
    held_out = snippets.held_out()
    model = SnippetModel(args.buckets, args.dim, len(texts))
    train(model, snippets, args)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.table.weight.detach(), args.out / "table.pt")
    size, before = (args.out / "table.pt").stat().st_size, accuracy(model, held_out)
    shown = Table("table", "left out", "file, kB", "smaller", "accuracy", "change")
    shown.add_row("fp32", "", f"{size / 1e3:.0f}", "1.0x", f"{100 * before:.1f}%", "")
    rows: list[dict[str, Any]] = []
    masks = {}
    for level in [0.0, *args.levels]:
        pruned = copy.deepcopy(model)
        config = {"sparsity_level": level, "sparse_block_shape": tuple(args.block)}
        post_training_sparse_quantize(pruned, DataNormSparsifier, backend="gradcomp", **config)
        folder = args.out / f"level-{level:g}"
        saved = save_table(pruned.table, folder)
        pruned.table = load_table(folder, model.table.mode)
        after, zeros = accuracy(pruned, held_out), float((pruned.table.int8 == 0).float().mean())
        rows.append({"level": level, "zeros": zeros, "bytes": saved, "ratio": size / saved, "accuracy": after})
        if level:
            masks[f"{100 * level:g}% left out"] = pruned.table.int8 != 0
        name = "int8" if not level else "sparse int8"
        shown.add_row(
            name, f"{100 * level:g}%", f"{saved / 1e3:.0f}", f"{size / saved:.1f}x", f"{100 * after:.1f}%", f"{100 * (after - before):+.1f}"
        )
    if masks:
        picture(masks, args.out / "masks.png")
    console = Console(width=100)
    console.print(f"{len(texts)} documents, {len(held_out[1])} snippets held out, a table of {args.buckets:,} x {args.dim}")
    console.print(shown)
    console.print(f"saved in {args.out}" + (f", picture in {args.out / 'masks.png'}" if masks else ""))
    print(json.dumps({"documents": len(texts), "bytes": size, "accuracy": before, "levels": rows}))


if __name__ == "__main__":
    main()

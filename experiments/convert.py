"""Converts a published checkpoint of BASED, its attention baseline, Mamba or Llama, or ours back.

    python -m experiments.convert --checkpoint=FOLDER --out=FOLDER [--kernel=llops]
    python -m experiments.convert --checkpoint=FOLDER --out=FOLDER --back

FOLDER has config.json and *.safetensors or pytorch_model.bin. The output is a folder for
`lowrank_attn.models.folder.load_decoder`, and `report.txt` in it has a line for every array.
With --kernel=llops the Taylor features of BASED become LLoPS features that begin as the same
function. --back writes a model of ours in the published layout: one that was converted in the names
and dtypes that it had.
"""

import dataclasses
import pathlib
import sys

from experiments.common import flags
from lowrank_attn.convert import (
    ConvertError,
    Leaf,
    read_checkpoint,
    with_llops,
    write_checkpoint,
)
from lowrank_attn.models.folder import load_decoder, save_decoder

setting = flags.setting


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a conversion."""

    checkpoint: str = setting("", "folder to read")
    out: str = setting("", "folder to write, which must not exist")
    back: bool = setting(False, "write one of our folders in the published layout")
    kernel: str | None = setting(
        None, "new kernel of BASED's linear layers, unchanged at first", choices=("llops",)
    )
    num_factors: int = setting(4, "factors p of llops, 2 or more", group="llops")
    num_features: int = setting(256, "features M of llops, 153 or more", group="llops")
    seed: int = setting(0, "seed of the features of llops that begin silent", group="llops")

    def __post_init__(self):
        """Check what can be checked without reading."""
        for name in ("checkpoint", "out"):
            if not getattr(self, name):
                raise ValueError(f"--{name}=FOLDER is needed.")
        if pathlib.Path(self.out).exists():
            raise ValueError(f"--out={self.out} exists already; nothing was changed.")
        if self.back and self.kernel:
            raise ValueError("--back with --kernel: the published layout has no llops features.")


def convert(config: Config) -> None:
    """Convert a published checkpoint."""
    decoder, params, source = read_checkpoint(config.checkpoint)
    if config.kernel:
        decoder, params = with_llops(
            decoder,
            params,
            num_factors=config.num_factors,
            num_features=config.num_features,
            seed=config.seed,
        )
    save_decoder(config.out, decoder, params, source)
    lines = [str(Leaf(**leaf)) for leaf in source["leaves"]]
    known = {str(leaf["path"]).partition("[")[0] for leaf in source["leaves"]}
    lines += [
        f"{path} {array.dtype}{list(array.shape)} is new" for path, array in params.items()
        if path not in known
    ]  # fmt: skip
    report = pathlib.Path(config.out, "report.txt")
    report.write_text("\n".join(lines) + "\n")
    total = sum(array.size for array in params.values())
    print(f"{total:,} parameters in {len(params)} arrays; a line for each: {report}")


def convert_back(config: Config) -> None:
    """Write one of our folders in a published layout."""
    write_checkpoint(config.out, *load_decoder(config.checkpoint))


def main(argv: list[str]) -> int:
    """Run the command; the exit status is 1 for a checkpoint that cannot be converted."""
    config = flags.parse(Config, argv)
    try:
        (convert_back if config.back else convert)(config)
    except (ConvertError, ValueError, FileNotFoundError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

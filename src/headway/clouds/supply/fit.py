"""Which image of a project's Dockerfile fits the machines of a run, and what was built here under a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object

#: Where `headway image build` writes, below the project.
IMAGES = Path("build") / "images"
_RECORD = "headway.json"
CPU = "cpu"
#: The build of torch's wheels for present GPUs; its kernels begin with Turing (compute capability 7.5).
CUDA = "cu130"
#: The last build with kernels for Pascal and Volta.
OLD_CUDA = "cu126"
_OLD = ("P4", "P40", "P100", "V100", "GTX10", "TITANV")
_ARM = ("GH200", "GB200", "GB300", "GRACE")
_NO_CUDA = ("MI", "TPU", "GAUDI", "TRAINIUM", "INFERENTIA")


@dataclass(frozen=True)
class Fit:
    """The build arguments of an image."""

    torch_build: str
    platform: str = "linux/amd64"

    def as_command(self) -> str:
        """Return the command that builds it."""
        platform = "" if self.platform == "linux/amd64" else f" PLATFORM={self.platform}"
        return f"make image TARGET=train TORCH_BUILD={self.torch_build}{platform}"


@dataclass(frozen=True)
class BuiltImage:
    """What `headway image build` remembers of an image."""

    name: str
    torch_build: str
    architecture: str


def fitting_image(gpus: int, accelerator: str | None) -> Fit | None:
    """Return the image that fits a machine; None if this Dockerfile makes none for its accelerator.

    Args:
        gpus: Accelerators of a machine.
        accelerator: Their name, as `launch.accelerator` has it.
    """
    name = (accelerator or "").upper().replace("-", "").replace("_", "").replace(" ", "").removeprefix("NVIDIA")
    platform = "linux/arm64" if name.startswith(_ARM) else "linux/amd64"
    if gpus == 0:
        return Fit(CPU, platform)
    if name.startswith(_NO_CUDA):
        return None
    is_old = any(name == old or name.startswith((f"{old}SXM", f"{old}PCIE")) for old in _OLD)
    return Fit(OLD_CUDA if is_old else CUDA, platform)


def remember(layout: Path, image: BuiltImage) -> None:
    """Write down beside an image in the OCI layout what it was built for."""
    write_json(layout / _RECORD, asdict(image))


def built_image(name: str) -> BuiltImage | None:
    """Return what is remembered of an image of that name, with or without a digest; None if it was built elsewhere."""
    wanted = name.partition("@")[0]
    for record in sorted(IMAGES.glob(f"*/{_RECORD}")):
        try:
            found = BuiltImage(**{key: str(value) for key, value in read_json_object(record).items()})
        except (OSError, ValueError, TypeError):
            continue
        if found.name == wanted:
            return found
    return None


def image_problems(name: str | None, gpus: int, accelerator: str | None) -> Iterator[ConfigError]:
    """Yield a problem if the image that a run names was built here, and for other machines."""
    built = None if name is None else built_image(name)
    fit = fitting_image(gpus, accelerator)
    if built is None or fit is None:
        return
    is_for_gpus = built.torch_build != CPU
    wanted = fit.platform.partition("/")[2]
    if gpus and not is_for_gpus:
        what = f"the image {built.name} has torch for processors only, and a machine has {gpus} GPUs"
    elif accelerator is not None and built.architecture != wanted:
        what = f"the image {built.name} is for {built.architecture}, and {accelerator} needs {wanted}"
    else:
        return
    yield ConfigError(what, where="launch.image", fix=f"{fit.as_command()}, and push it")


def image_row(name: str | None, gpus: int, accelerator: str | None) -> str:
    """Return the image of a run in words, and the one that fits."""
    fit = fitting_image(gpus, accelerator)
    fits = f"no image of the Dockerfile fits {accelerator}" if fit is None else f"fits: {fit.as_command()}"
    return f"{name or 'none'}; {fits}"

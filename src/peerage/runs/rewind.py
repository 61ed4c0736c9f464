"""Let a real peer go back to a checkpoint that it kept, and forget the rounds after it."""

from pathlib import Path

from peerage.errors import InputError
from peerage.records import checkpoint
from peerage.runs.kept_models import remove_models_after
from peerage.runs.run import locked


def rewind(folder: Path, round: int) -> list[int]:
    """Remove all checkpoints and model files after a round; returns the rounds of the former.

    The peer continues from the checkpoint of that round when it is started again, and then removes
    later rows of its metrics. The count of noisy messages that it has released stays.
    """
    if not (folder / "peer.json").exists():
        raise InputError(f"{folder} is not the folder of a peer; give one that `peerage node` made")
    with locked(folder):
        kept = checkpoint.finished(folder)
        target = next((one for one in kept if checkpoint.round_of(one) == round), None)
        if target is None:
            known = ", ".join(str(checkpoint.round_of(one)) for one in kept) or "none"
            raise InputError(
                f"{folder} has no checkpoint of round {round}, only of: {known}; choose one of "
                "these, and use --keep-every to keep more"
            )
        checkpoint.read(target, "choose another round")
        later = kept[kept.index(target) + 1 :]
        remove_models_after(folder, round)
        (folder / "summary.json").unlink(missing_ok=True)  # of a run that was finished
        for old in reversed(later):  # the newest first, so that an interruption does no harm
            checkpoint.remove(old)
    return [checkpoint.round_of(one) for one in later]

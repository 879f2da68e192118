"""Which version produced a sample, and how far it is behind what the lane serves now.

An engine stamps the version on what it generates (`Generation.weight_version`) where its backend declares
the capability `weight-version`: the reference engine and vLLM the number that the lane published, SGLang its
weight version label, which the lane sets at each commit. What has no stamp is never guessed at: it is
`unsynced` where every replica stamps, so that only an engine which has not taken part in a sync yet (a fresh
or restarted one) can have made it, and `unknown` where some replica cannot stamp at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from weightlane.errors import StaleSampleError

if TYPE_CHECKING:
    from weightlane.messages import Generation

SampleOrigin: TypeAlias = Literal["published", "foreign", "unsynced", "unknown"]
"""`published`: by a version of this lane. `foreign`: stamped with a version that this lane has not published,
such as one from before a restart of the trainer. `unsynced`: by weights from before the engine's first sync.
`unknown`: not stamped, and some replica cannot stamp."""


@dataclass(frozen=True, slots=True)
class SampleVersion:
    """One sample's version.

    `version` is None for `unsynced` and `unknown`. `behind` counts the versions that the lane has published
    since (0: it is the newest), and is None unless the origin is `published`. `newest` is what the lane
    published last; None before its first commit.
    """

    origin: SampleOrigin
    version: int | None
    behind: int | None
    newest: int | None

    def require(self, *, at_most_behind: int) -> SampleVersion:
        """This, if it is known to be that fresh.

        Raises:
            StaleSampleError: it is further behind, or nobody knows how far.
        """
        if self.behind is not None and self.behind <= at_most_behind:
            return self
        far = f"{self.behind} versions behind" if self.behind is not None else "of an age nobody knows"
        raise StaleSampleError(
            f"A sample is {far} ({self}).",
            f"At most {at_most_behind} were allowed.",
            "Drop it, or correct for it as off-policy; where engines cannot stamp, note versions yourself.",
        )

    def __str__(self) -> str:
        if self.origin == "published":
            return f"version {self.version}, newest {self.newest}"
        stamp = (
            f"version {self.version}, which this lane has not published" if self.version is not None else ""
        )
        return f"{self.origin}: {stamp or 'no version stamped'}, newest {self.newest}"


class PublishedVersions:
    """Every version that a lane published, in order. A version that is published again counts as new."""

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._count = 0
        self._newest: int | None = None

    def add(self, version: int) -> None:
        """Notes a commit."""
        self._position[version] = self._count
        self._count += 1
        self._newest = version

    def of(self, sample: Generation | int | None, *, all_stamp: bool) -> SampleVersion:
        """The version of a sample; `all_stamp`: every replica stamps what it generates."""
        version = sample if sample is None or isinstance(sample, int) else sample.weight_version
        if version is None:
            return SampleVersion("unsynced" if all_stamp else "unknown", None, None, self._newest)
        position = self._position.get(version)
        if position is None:
            return SampleVersion("foreign", version, None, self._newest)
        return SampleVersion("published", version, self._count - 1 - position, self._newest)

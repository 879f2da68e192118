"""Judges one backend against one engine's facts: version range, contract version, probe.

Pure: facts in, verdict out, nothing raised and nothing warned. `weightlane.selection` ranks the verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from packaging.version import InvalidVersion, Version

from weightlane.facts import is_word_alone
from weightlane.loading import api_refusal
from weightlane.pins import assume_variable
from weightlane.probes import NotViable, Viable, always_viable

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from weightlane.facts import EngineFacts, FactsSource
    from weightlane.hook_calls import Selected

RangePosition: TypeAlias = Literal["inside", "above", "below", "excluded", "unknown"]
"""Where a version lies. `excluded` is a version that the range names with `!=`, which no probe overrules;
`unknown` one that was not found or is no PEP 440 version."""

_SOURCES: dict[FactsSource, str] = {
    "worker": "as the live worker says",
    "server": "as the live server says",
    "installed": "as installed here",
    "assumed": "assumed",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One backend judged; `reason` is "" when it is viable, else says why it is not taken."""

    backend: Selected
    position: RangePosition
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    cause: BaseException | None = None

    @property
    def viable(self) -> bool:
        """Whether the backend may be chosen."""
        return not self.reason


def judge(backend: Selected, facts: EngineFacts, *, stated_by: str = "") -> Verdict:
    """Decides whether a backend fits an engine, and on which evidence.

    `stated_by` names the variable that the version in `facts` comes from, "" where it was found.

    The probe beats the version string where they disagree, and a note says so. `always_viable` looks at
    nothing, so with it the range alone decides.
    """
    descriptor = backend.descriptor
    refusal = api_refusal(descriptor)
    position = position_of(facts.version, descriptor.versions)
    if refusal:
        return Verdict(backend, position, reason=refusal)
    found, wanted = (
        _engine_words(facts, stated_by),
        f"{descriptor.engine} {str(descriptor.versions) or 'of any version'}",
    )
    if position == "excluded":
        return Verdict(backend, position, reason=f"{found} is a version that it excludes ({wanted})")
    if descriptor.role == "trainer" and facts.source == "assumed" and not facts.version:
        # It lives in this process, so that no probe can speak for one that is not here.
        return Verdict(backend, position, reason=f"{facts.engine} is not installed here")
    probed = descriptor.probe is not always_viable
    if not probed and position != "inside":
        return Verdict(backend, position, reason=f"it serves {wanted} and found {found}")
    if probed and position == "inside" and is_word_alone(facts):
        note = f"no {facts.engine} was at hand, so its probe had nothing to look at: the version decided"
        return Verdict(backend, position, (f"{found} fits {wanted}",), (note,))
    try:
        result: object = descriptor.probe(facts)
    except Exception as exc:  # noqa: BLE001 - one plugin's probe must not stop the others
        return Verdict(backend, position, reason=f"its probe failed: {type(exc).__name__}: {exc}", cause=exc)
    if isinstance(result, NotViable):
        return Verdict(backend, position, reason=_refused(result, position, found, wanted))
    if not isinstance(result, Viable):
        return Verdict(
            backend, position, reason=f"its probe returned {result!r}, neither Viable nor NotViable"
        )
    evidence = _lines(result.evidence)
    if evidence is None:
        shown = f"{type(result.evidence).__name__} as its evidence, and must give a tuple of lines"
        return Verdict(backend, position, reason=f"its probe gave a {shown}")
    if position == "inside":
        return Verdict(backend, position, (f"{found} fits {wanted}", *evidence))
    return Verdict(backend, position, evidence, (_outside(position, found, wanted, evidence, facts.engine),))


def position_of(version: str, versions: SpecifierSet) -> RangePosition:
    """Where `version` lies to a range, pre-releases and development versions included."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return "unknown" if len(versions) else "inside"
    if versions.contains(parsed, prereleases=True):
        return "inside"
    failed = [item for item in versions if not item.contains(parsed, prereleases=True)]
    if any(item.operator == "!=" for item in failed):
        return "excluded"
    above = [
        item.operator in {"<", "<="} or _is_above(parsed, item.operator, item.version) for item in failed
    ]
    return "above" if all(above) else "below"


def _is_above(version: Version, operator: str, bound: str) -> bool:
    """For `==`, `===` and `~=`: on which side of the named version (`1.2.*` counts as 1.2) the other lies."""
    if operator in {">", ">="}:
        return False
    try:
        return version > Version(bound.removesuffix(".*"))
    except InvalidVersion:
        return False


def _lines(evidence: object) -> tuple[str, ...] | None:
    # A plain string would become one line per letter.
    if isinstance(evidence, tuple | list) and all(isinstance(line, str) for line in evidence):
        return tuple(evidence)
    return None


def _engine_words(facts: EngineFacts, stated_by: str) -> str:
    if stated_by:
        return f"{facts.engine} {facts.version} (as {stated_by} says)"
    if facts.version:
        return f"{facts.engine} {facts.version} ({_SOURCES[facts.source]})"
    unknown = f"{facts.engine} of unknown version"
    return (
        f"{unknown} (it is not installed here and no engine told)" if facts.source == "assumed" else unknown
    )


def _refused(result: NotViable, position: RangePosition, found: str, wanted: str) -> str:
    if position == "inside":
        return f"its probe says: {result.reason} (although {found} fits {wanted})"
    return f"its probe says: {result.reason}; and it serves {wanted}, not {found}"


def _outside(position: RangePosition, found: str, wanted: str, evidence: tuple[str, ...], engine: str) -> str:
    seen = "; ".join(evidence) or "it gave no evidence"
    if position == "unknown":
        return (
            f"the version of {found} cannot be compared with {wanted}; the probe decided ({seen}). "
            f"{assume_variable(engine)} states a version"
        )
    side = "newer than" if position == "above" else "older than"
    return (
        f"{found} is {side} the versions this backend was written for ({wanted}); it runs because its probe "
        f"passed: {seen}"
    )


def newest_bound(versions: SpecifierSet) -> Version:
    """The largest version that a range names; 0 when it names none."""
    return max(_named_versions(versions), default=Version("0"))


def oldest_bound(versions: SpecifierSet) -> Version:
    """The smallest version that a range names; 0 when it names none."""
    return min(_named_versions(versions), default=Version("0"))


def _named_versions(versions: SpecifierSet) -> list[Version]:
    named: list[Version] = []
    for item in versions:
        try:
            named.append(Version(item.version.removesuffix(".*")))
        except InvalidVersion:  # `===` takes any text
            continue
    return named

"""Which regions of a plan call one body: their bodies are equal, and so is what their treatments make of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from partita.plans.treatment import Site, Treatment, annotation_suffices, call_treatment, marks_of
from partita.regions import Partition
from partita.regions.equal_bodies import shareable_bodies


@runtime_checkable
class SharesBodies(Protocol):
    """A treatment whose result for one body can be called by other regions with an equal body."""

    def sharing_key(self, site: Site) -> Hashable | None:
        """What the result depends on beside the body; None if it is for this site alone."""


def shared_bodies(partition: Partition, treatments: Sequence[Treatment], sites: Sequence[Site]) -> list[int]:
    """For each region the first one whose treated body it calls; itself if it has its own."""
    # The values of a shared body are those of one of its calls; of a joint graph, the storages of all are counted.
    if partition.program.joint is not None or not any(isinstance(treatment, SharesBodies) for treatment in treatments):
        return list(range(len(partition)))
    first: dict[Hashable, list[int]] = {}
    found = list(range(len(partition)))
    for at, (body, treatment, site) in enumerate(zip(shareable_bodies(partition), treatments, sites, strict=True)):
        if not isinstance(treatment, SharesBodies):
            continue
        key = call_treatment(treatment.sharing_key, site, treatment, site.region)
        if key is None:
            continue
        like = first.setdefault((body, key), [])
        same = (known for known in like if _treats_alike(treatments[known], treatment, sites[known], site))
        found[at] = next(same, at)
        if found[at] == at:
            like.append(at)
    return found


def _treats_alike(one: Treatment, other: Treatment, site: Site, other_site: Site) -> bool:
    if one is not other and (type(one) is not type(other) or one != other):
        return False
    return annotation_suffices(one) or marks_of(one, site.region) == marks_of(other, other_site.region)

"""When requests that do not draft are tried again: so often that it takes a fixed share of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_core.budget.debt import Debt

TIME_SHARE = 0.005
"""Of the time that retries may cost, after a few that gained nothing. On a CPU they cost a quarter more: the next steps
are slower, since the caches hold other data than the target's weights."""
SAVED_SHARE, SAVED_DECAY = 0.05, 1 - 1 / 128
"""Of the time that drafting saves, the share that retries may cost besides; and how what it saved shrinks with each
step. Where it pays now and then, to be off for long costs more than retries do."""
LEAST_RARE, NUM_PATIENT, MOST_RARE = 0.25, 8, 1.0
"""A retry counts as LEAST_RARE times its cost after one that gained. Each NUM_PATIENT retries in a row that gain
nothing add 1 to this factor, up to MOST_RARE: so retries take between 4 times TIME_SHARE of the time and once."""
MOST_HOPELESS = 7
"""Each retry in a row while drafting would not pay, if all draft tokens were accepted, adds 1 to this factor, up to so
often: such retries only show whether drafting has become cheaper."""
NUM_TOKENS, MOST_TOGETHER = 4, 4
"""Draft tokens of a request that is tried again, and how many are in a step, but for shadows. More would take so long
that the next retry had to wait for seconds; and hidden states that were not observed yet are read first."""
NUM_SHADOWED = 3
"""Retries in a row in which all draft in shadow, where that takes little time. Then some are verified, to measure what
that costs: what seems too dear is measured in no other way."""
PROMISING, MOST_FOLLOWING = 1.5, 3
"""Retries in shadow that would have gained PROMISING times what they would have cost are followed by others at once, up
to so many, some of which are verified: it takes several until the estimates have followed a change of the text."""
GAIN_SHARE, MOST_SAVED = 0.5, 8.0
"""Of the time that a retry gains, the share that later ones may lose, and how many times a retry's cost is saved up."""
OUTLIER = 4.0
"""A retry that took longer than this many times what was expected was interrupted, and counts as that."""


class Retries:
    """Chooses which requests are tried again, and counts what that costs: drafting, and a slower forward
    pass, less the time that accepted draft tokens save. A retry that gains is followed by others at
    once, until the estimates have changed.

    A few requests are tried at once, in turn. Where drafting takes little time, all draft in shadow instead: their
    draft tokens are not verified, but compared with the tokens that they emit anyway. Now and then a few are verified.

    Attributes: ids, of the requests that are tried again in this step. shadows, ids of those that draft in shadow.
    may_gain, whether drafting would pay if all draft tokens were accepted. num_vain, retries in a row that have gained
    nothing, as far as is known.
    """

    def __init__(self) -> None:
        self._debt = Debt(TIME_SHARE)
        self.ids: list[str] = []
        self.shadows: list[str] = []
        self._is_whole = False  # no other request drafts in this step
        self._saved_s = self._total_s = 0.0  # what drafting saved of how much time, lately
        self._next = 0  # the first of the next ones, among those that are off
        self._expected_s = self._drafting_s = 0.0  # of this step's
        self.may_gain = True
        self.num_vain = 0
        self._num_hopeless = 0  # retries in a row that could not have gained
        self._num_shadowed = 0  # retries in a row in which nothing was verified
        self._num_following = 0  # retries in a row that followed one at once

    @property
    def number(self) -> int:
        """Of requests that draft only because they are tried again."""
        return len(self.ids) + len(self.shadows)

    @property
    def is_alone(self) -> bool:
        """Whether there are retries in this step, and no other drafts of this proposer."""
        return self.number > 0 and self._is_whole

    @property
    def is_due(self) -> bool:
        return self._debt.is_paid

    def num_until_due(self, step_s: float) -> int:
        """After how many steps of so many seconds the next one is due."""
        return self._debt.num_steps(step_s)

    def begin(self) -> None:
        """Begin a step."""
        self.ids, self.shadows, self._expected_s, self._drafting_s = [], [], 0.0, 0.0

    def choose(
        self, ids: Sequence[str], limits: Sequence[int], numbers: list[int], *, has_shadows: bool = False
    ) -> list[int]:
        """Return the numbers of draft tokens together with those of requests that are tried again, now that a retry is
        due. Not all at once: what some show tells of the others, too.

        ids, limits: of the requests, and the most draft tokens of each. numbers: of draft tokens; 0: it is off, as at
            least one is.
        has_shadows: whether drafting takes so little time that all of these draft in shadow.
        """
        off = [i for i, number in enumerate(numbers) if not number]
        first = self._next % len(off)
        off = off[first:] + off[:first]
        verifies = not has_shadows or self._num_shadowed == NUM_SHADOWED
        self._num_shadowed = 0 if verifies else self._num_shadowed + 1
        tried = off[:MOST_TOGETHER] if verifies else []
        others = off[len(tried) :] if has_shadows else []
        self._next, self._is_whole = first + len(tried), len(off) == len(numbers)
        self.ids, self.shadows = [ids[i] for i in tried], [ids[i] for i in others]
        chosen = [*numbers]
        for i in tried:
            chosen[i] = min(limits[i], NUM_TOKENS)
        for i in others:
            chosen[i] = limits[i]
        return chosen

    def judge(self, *, may_gain: bool) -> None:
        """Set `may_gain`. If it has become True, what was lost while it was not counts as little as ever."""
        self.may_gain = may_gain
        if may_gain:
            self._debt.reduce(1 + self._num_hopeless)
            self._num_hopeless = 0

    def expect(self, drafting_s: float, more_s: float) -> None:
        """drafting_s: what the step's retries took. more_s: by how much their draft tokens should slow down the forward
        pass."""
        self._expected_s, self._drafting_s = drafting_s + more_s, drafting_s

    def show(self, gained_s: float, more_s: float, choice_s: float) -> None:
        """Note what retries in shadow would have gained, had they been verified, and by how much that would have slowed
        down their step. choice_s: what the new choice takes that follows a gain."""
        if gained_s > more_s:
            self.num_vain = 0
            self._debt.add(choice_s)
        is_promising = gained_s > PROMISING * more_s and self._num_following < MOST_FOLLOWING
        self._num_following = self._num_following + 1 if is_promising else 0
        if is_promising:
            self._num_shadowed = NUM_SHADOWED
            self._debt.forgive()

    def end_steps(
        self,
        seconds: Sequence[float],
        plain_s: float,
        accepted: Mapping[str, int],
        num_requests: int,
        *,
        is_prefill: bool = False,
    ) -> None:
        """Count steps, the last of which may have had retries.

        seconds: of each. plain_s: of a plain step. accepted: of the last step, {request id: accepted draft tokens};
        empty if it is not known whose they were. num_requests, is_prefill: of the last step.
        """
        total_s, kept = sum(seconds), SAVED_DECAY ** len(seconds)
        saved_s = sum(accepted.values()) * plain_s / num_requests
        if saved_s and not is_prefill:
            saved_s -= seconds[-1] - plain_s
        self._saved_s, self._total_s = kept * self._saved_s + saved_s, kept * self._total_s + total_s
        if self._total_s:
            self._debt.share = TIME_SHARE + SAVED_SHARE * max(0.0, self._saved_s) / self._total_s
        self._debt.pay(total_s)
        if self._expected_s:
            lost_s = self._expected_s
            if self._is_whole and not is_prefill:
                # Not at least what was expected: costs that are estimated too high would never be measured again.
                lost_s = min(max(self._drafting_s, seconds[-1] - plain_s), OUTLIER * lost_s)
            gained_s = sum(accepted.get(request_id, 0) for request_id in self.ids) * plain_s / num_requests
            rare = min(LEAST_RARE + self.num_vain / NUM_PATIENT, MOST_RARE)
            rare = 1.0 if self._debt.has_savings else rare  # else retries would go on though they lose on average
            if not self.may_gain and gained_s <= lost_s:
                self._num_hopeless = min(self._num_hopeless + 1, MOST_HOPELESS)
            rare += self._num_hopeless
            if gained_s > lost_s:
                self._debt.save(GAIN_SHARE * (gained_s - lost_s), MOST_SAVED * lost_s)
            else:
                self._debt.add((lost_s - gained_s) * rare)
            self.num_vain = 0 if gained_s > lost_s else self.num_vain + 1
            self._expected_s = 0.0

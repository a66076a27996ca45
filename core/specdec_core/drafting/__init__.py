"""Building blocks for proposers with a draft model or head: trees of draft tokens, grown level by level from its
logits."""

from specdec_core.drafting.builder import DraftBuilder as DraftBuilder, Grown as Grown
from specdec_core.drafting.distributions import draws_some as draws_some, most_likely_of as most_likely_of
from specdec_core.drafting.draft_pass import DraftPass as DraftPass, DraftSlots as DraftSlots
from specdec_core.drafting.dynamic import DynamicTree as DynamicTree, dynamic_grower_of as dynamic_grower_of
from specdec_core.drafting.features import FeatureProposer as FeatureProposer
from specdec_core.drafting.last_hidden import LastHiddenProposer as LastHiddenProposer
from specdec_core.drafting.level import Level as Level, TreeGrower as TreeGrower, grow as grow
from specdec_core.drafting.rows import RequestRows as RequestRows, RequestTensors as RequestTensors
from specdec_core.drafting.static import StaticTree as StaticTree, grower_of as grower_of

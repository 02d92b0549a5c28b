"""What rank 0 has to do for `pipeinfer run`, beside its part of the plan. Runs nothing."""

from dataclasses import dataclass

from pipeinfer.job.options.sections import Output, Records
from pipeinfer.job.requests.experiment import ExperimentSettings
from pipeinfer.job.requests.journal import Journal
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RunWork:
    """`key`: names the request in the notes. `has_draft`: a draft is given; `is_split`: so is the split of layers."""

    request: GenerationRequest
    tokenizer: Tokenizer
    key: str
    journal: Journal
    settings: ExperimentSettings
    output: Output
    records: Records
    has_draft: bool
    is_split: bool

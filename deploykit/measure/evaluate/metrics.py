"""Score an engine on labelled samples: one score per sample, higher is better.

Scores are per sample so that two engines can be compared on the same samples. A user's own metric
is a function of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.paths import import_object
from deploykit.measure.evaluate.accuracy import TOP1, top1
from deploykit.measure.statistics import Drop, paired_drop, relative_rise
from deploykit.runtimes.data.samples import Samples
from deploykit.runtimes.engine import Arrays, Engine

IGNORED = -100  # the label of a token that does not count, as in torch's cross_entropy
_BLOCK = 1 << 20  # logits converted to float64 at a time


@dataclass(frozen=True)
class Metric:
    """A score per sample, and the unit of a drop.

    `score`: outputs by name, in the model's order, and the labels of the same samples -> float64
    (samples,), higher is better. `unit`: "pp" for shares, "%" for log-likelihoods (the drop is
    perplexity's relative rise), "" for the score's own. `weigh`: labels -> (samples,), how much
    each sample counts; None for equal weights.
    """

    name: str
    unit: str
    score: Callable[[Arrays, np.ndarray], np.ndarray]
    weigh: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass
class Scores:
    """Scores and weights of the samples so far, in the order of the samples."""

    metric: Metric
    where: str  # the data file, for error messages
    _values: list[np.ndarray] = field(default_factory=list)
    _weights: list[np.ndarray] = field(default_factory=list)

    def add(self, outputs: Arrays, labels: np.ndarray) -> None:
        """The next samples' outputs and labels. Raises BadInput naming the data or the metric."""
        labels = labels.view()
        labels.flags.writeable = False  # the other engine is scored on the same labels
        try:
            self._values.append(self.metric.score(outputs, labels))
            if self.metric.weigh is not None:
                self._weights.append(self.metric.weigh(labels))
        except BadInput as exc:
            raise BadInput(f"{self.where}: {exc.message}", hint=exc.hint) from exc

    @property
    def values(self) -> np.ndarray:
        """Shape (samples,), float64."""
        return np.concatenate(self._values)

    @property
    def weights(self) -> np.ndarray:
        """Shape (samples,), float64."""
        return np.concatenate(self._weights) if self._weights else np.ones(len(self.values))


def score(engine: Engine, samples: Samples, metric: Metric, batch_size: int = 64) -> Scores:
    """Score an engine over labelled samples; no more than one batch of outputs is kept.

    Samples that do not fill a fixed batch are left out. Raises BadInput.
    """
    if samples.labels is None:
        raise BadInput(f"{samples.where}: no array 'labels'", hint="labelled data are needed here")
    scores = Scores(metric, samples.where)
    size, used = samples.batching(batch_size, engine.inputs)
    for number, feeds in enumerate(samples.first(used).batches(size)):
        values = engine(feeds)
        outputs = {spec.name: values[spec.name] for spec in engine.outputs}
        scores.add(outputs, samples.labels[number * size : number * size + size])
    return scores


def drop_of(reference: Scores, candidate: Scores) -> Drop:
    """How much worse the candidate scores, with its interval. Raises BadInput."""
    metric = reference.metric
    if metric.unit == "%":
        return relative_rise(reference.values, candidate.values, reference.weights, metric.name)
    return paired_drop(reference.values, candidate.values, metric.name, unit=metric.unit)


def find_metric(name: str) -> Metric:
    """ "top1", "perplexity", or a user's `pkg.mod:function` or `./file.py:function`.

    The function takes (outputs, labels) as `Metric.score` does. Importing it runs its code. Raises
    NotFound, BadInput.
    """
    if name in METRICS:
        return METRICS[name]
    if ":" not in name:
        raise BadInput(
            f"'{name}' is not a metric",
            hint=f"one of: {', '.join(METRICS)}; or your own, as pkg.mod:function or "
            "./file.py:function",
        )
    function = import_object(name)
    if not callable(function):
        raise BadInput(f"{name}: is a {type(function).__name__}, not a function")
    return Metric(name, "", lambda outputs, labels: _user_scores(name, function, outputs, labels))


def log_likelihood(outputs: Arrays, labels: np.ndarray) -> np.ndarray:
    """The mean log-likelihood of each sample's labels under the first output, in nats per token.

    The first output: logits, float (samples, T, vocabulary) or (samples, vocabulary). `labels`:
    integers, (samples, T) or (samples,), each the token that the logits at its place predict;
    -100 is left out, and a sample without any other label scores 0 (its weight is 0). Returns
    float64 (samples,). Raises BadInput.
    """
    logits = next(iter(outputs.values()))
    if labels.dtype.kind not in "iu" or logits.dtype.kind in "biuO":
        raise BadInput(
            f"{PERPLEXITY}: needs logits and integer labels, got {logits.dtype} and {labels.dtype}"
        )
    if logits.ndim not in (2, 3) or logits.shape[:-1] != labels.shape or not logits.shape[-1]:
        raise BadInput(
            f"{PERPLEXITY}: labels of shape {labels.shape} need a first output of "
            f"{(*labels.shape, 'vocabulary')}, it is {logits.shape}"
        )
    vocabulary = logits.shape[-1]
    flat = labels.reshape(-1)
    counted = np.flatnonzero(flat != IGNORED)
    used = flat[counted]
    if used.size and (int(used.min()) < 0 or int(used.max()) >= vocabulary):
        raise BadInput(
            f"{PERPLEXITY}: labels run from {used.min()} to {used.max()}, the vocabulary has "
            f"{vocabulary} tokens",
            hint=f"{IGNORED} is the label of a token that does not count",
        )
    rows = logits.reshape(-1, vocabulary)
    found = np.zeros(flat.shape)
    step = max(1, _BLOCK // vocabulary)
    for start in range(0, len(counted), step):
        places = counted[start : start + step]
        block = rows[places].astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite logits give NaN, which is refused later
            block -= block.max(1, keepdims=True)
            chosen = block[np.arange(len(places)), flat[places].astype(np.intp)]
            found[places] = chosen - np.log(np.exp(block).sum(1))
    sums = found.reshape(len(labels), -1).sum(1)
    return np.asarray(sums / np.maximum(tokens(labels), 1.0))


def tokens(labels: np.ndarray) -> np.ndarray:
    """How many labels of each sample count; float64 (samples,)."""
    return np.asarray((labels != IGNORED).reshape(len(labels), -1).sum(1, dtype=np.float64))


def _user_scores(
    name: str, function: Callable[..., object], outputs: Arrays, labels: np.ndarray
) -> np.ndarray:
    """A user's scores, checked; errors name the metric."""
    try:
        found = np.asarray(function(outputs, labels))
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        raise BadInput(f"metric {name}: failed: {type(exc).__name__}: {first_line(exc)}") from exc
    if found.dtype.kind not in "biuf" or found.shape != (len(labels),):
        raise BadInput(
            f"metric {name}: returned {found.dtype}{list(found.shape)}",
            hint=f"one number for each of the {len(labels)} samples of the batch is needed",
        )
    scores = found.astype(np.float64)
    if not bool(np.isfinite(scores).all()):
        raise BadInput(f"metric {name}: returned NaN or infinity for a sample")
    return scores


PERPLEXITY = "perplexity"
METRICS = {
    "top1": Metric(
        TOP1, "pp", lambda outputs, labels: top1(next(iter(outputs.values())), labels, TOP1)
    ),
    PERPLEXITY: Metric(PERPLEXITY, "%", log_likelihood, tokens),
}

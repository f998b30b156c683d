"""Trains a scikit-learn model on a data set that ships with scikit-learn, epoch by epoch.

    python tilt/jobs/train.py --model mlp --data digits --batch-size 64 --epochs 30

One line per epoch: loss (log loss; inertia for k-means) and accuracy on held-out samples.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.cluster import MiniBatchKMeans
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

LOADERS = {
    "digits": datasets.load_digits,
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
    "breast_cancer": datasets.load_breast_cancer,
}
TREES_PER_EPOCH = 10


def split(name: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Standardised training and test samples: (samples, features), and their classes."""
    data = LOADERS[name]()
    x_train, x_test, y_train, y_test = train_test_split(
        data.data, data.target, test_size=0.25, random_state=seed
    )
    scaler = StandardScaler().fit(x_train)
    return scaler.transform(x_train), scaler.transform(x_test), y_train, y_test


def batches(count: int, size: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Indexes of a shuffled epoch, `size` at a time."""
    order = generator.permutation(count)
    for start in range(0, count, size):
        yield order[start : start + size]


def make(model: str, seed: int) -> Any:
    if model == "mlp":
        return MLPClassifier(hidden_layer_sizes=(128, 64), random_state=seed)
    if model == "sgd":
        return SGDClassifier(loss="log_loss", random_state=seed)
    if model == "forest":
        return RandomForestClassifier(
            n_estimators=TREES_PER_EPOCH, warm_start=True, random_state=seed, n_jobs=1
        )
    if model == "svm":
        return SVC(random_state=seed)
    return MiniBatchKMeans(n_clusters=10, random_state=seed, n_init=1)


def epoch(name: str, model: Any, number: int, x: np.ndarray, y: np.ndarray, size: int, seed: int) -> None:
    """One pass over the training samples, in the way that this kind of model learns."""
    if name == "forest":  # grows by a few trees
        model.n_estimators = TREES_PER_EPOCH * number
        model.fit(x, y)
    elif name == "svm":  # a new fit with a weaker margin
        model.C = 0.1 * 1.3**number
        model.fit(x, y)
    else:
        classes = np.unique(y)
        for chosen in batches(len(x), size, np.random.default_rng((seed, number))):
            if name == "kmeans":
                model.partial_fit(x[chosen])
            else:
                model.partial_fit(x[chosen], y[chosen], classes=classes)


def judge(name: str, model: Any, x: np.ndarray, y: np.ndarray) -> str:
    """Loss and accuracy on held-out samples, as text."""
    if name == "kmeans":
        return f"inertia {-model.score(x) / len(x):8.4f}"
    accuracy = f"accuracy {model.score(x, y):.4f}"
    if name == "svm":
        return accuracy
    return f"loss {log_loss(y, model.predict_proba(x), labels=np.unique(y)):.4f}  {accuracy}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("mlp", "sgd", "forest", "svm", "kmeans"), default="mlp")
    parser.add_argument("--data", choices=sorted(LOADERS), default="digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    x_train, x_test, y_train, y_test = split(options.data, options.seed)
    model = make(options.model, options.seed)
    print(
        f"{options.model} on {options.data}: {len(x_train)} samples, batch size {options.batch_size}",
        flush=True,
    )
    start = time.perf_counter()
    for number in range(1, options.epochs + 1):
        epoch(options.model, model, number, x_train, y_train, options.batch_size, options.seed)
        result = judge(options.model, model, x_test, y_test)
        print(
            f"epoch {number:3d}/{options.epochs}  {result}  {time.perf_counter() - start:6.2f} s", flush=True
        )


if __name__ == "__main__":
    main()

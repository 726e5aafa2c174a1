"""Brings a real Slurm up, once a session."""

import warnings
from collections.abc import Iterator

import pytest
from cluster import Cluster, Unavailable, running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm of four nodes; a machine without one skips, which fails in CI."""
    try:
        with running(tmp_path_factory.mktemp("shared")) as cluster:
            for sentence in cluster.lacks:
                warnings.warn(sentence, stacklevel=1)
            yield cluster
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The session's cluster, which this process's own clients find by SLURM_CONF."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return cluster

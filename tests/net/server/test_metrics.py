"""/metrics: well-formed, and for members only where the operator wants that."""

from __future__ import annotations

import re
from pathlib import Path

from tests.net.real_server import ONES, SMALL, Peer, invite, refusal, served

_SAMPLE = re.compile(r'(aflock_[a-z_]+)((?:\{[a-z]+="[^"\\\n]*"\})?) (-?[0-9.e+-]+|\+Inf|NaN)')


def _samples(text: str) -> dict[str, float]:
    """The samples of an exposition, each announced by its help and type, every line well-formed."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert len(line.split(" ", 3)) == 4
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            assert kind in ("gauge", "counter", "histogram")
            kinds[name] = kind
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            base = re.sub("_(bucket|sum|count)$", "", match[1]) if match[1] not in kinds else match[1]
            assert base in kinds, line
            found[match[1] + match[2]] = float(match[3])
    assert text.endswith("\n")
    return found


def test_metrics_and_status_can_be_for_members_only(tmp_path: Path) -> None:
    document = {**SMALL, "strategy": {"name": "ace"}, "federation": {"clients": 2}}
    with served(tmp_path / "fed", document, changes=["server.status=token"]) as server:
        peers = [Peer(server, invite(server.folder, name)) for name in ("alice", "bob")]
        with Peer(server) as nobody:
            _samples(peers[0].request("GET", "/metrics")[2].decode())  # before anything has happened
            for peer in peers:
                peer.hello()
            for peer in (*peers, *peers, peers[0]):
                peer.pull()
                assert peer.push(ONES)[0] == 200
            peers[0].pull()
            for path in ("/v1/status", "/metrics"):
                assert refusal(nobody.request("GET", path)) == (401, "token")
            for path in ("/healthz", "/readyz"):
                assert nobody.request("GET", path)[0] == 200
            assert peers[1].request("GET", "/v1/status")[0] == 200
            status, headers, body = peers[1].request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    found = _samples(body.decode())
    assert found["aflock_version"] == 4
    assert found['aflock_updates_total{outcome="applied"}'] == 4
    assert found['aflock_updates_total{outcome="buffered"}'] == 1
    assert found['aflock_updates_total{outcome="rejected"}'] == 0
    assert found['aflock_refused_total{code="token"}'] == 2
    assert found["aflock_staleness_count"] == 5
    assert found['aflock_staleness_bucket{le="+Inf"}'] == 5
    assert found["aflock_buffer_fill"] == 0
    assert found["aflock_row_cache_bytes"] == 2 * 8 * 4
    assert found["aflock_state_bytes"] > found["aflock_row_cache_bytes"]
    assert found["aflock_journal_seconds_count"] >= 5
    assert found["aflock_journal_seconds_sum"] > 0
    assert found['aflock_client_updates_total{client="alice"}'] == 3
    assert found['aflock_client_share{client="bob"}'] == 0.4
    assert found["aflock_open_jobs"] == 1
    assert found["aflock_clients"] == 2
    assert found["aflock_disk_full"] == 0
    assert found["aflock_resident_bytes"] > 1e7
    buckets = [value for name, value in found.items() if name.startswith("aflock_journal_seconds_bucket")]
    assert buckets == sorted(buckets)

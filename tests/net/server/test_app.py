"""What a client does, over real sockets to a real process: jobs, updates, waiting pulls."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

from tests.net.real_server import (
    ONES,
    SMALL,
    Peer,
    Server,
    Wire,
    bearer,
    invite,
    joined,
    refusal,
    served,
    update_head,
    working,
)
from tests.net.server.waiting import waiting

# --- what a client does ----------------------------------------------------------------------------------------------


def test_a_client_comes_works_and_goes(shared: Server) -> None:
    with Peer(shared, invite(shared.folder, "alice")) as alice:
        hello = alice.hello()
        assert hello["protocol"] == 1
        assert re.fullmatch("[0-9a-f]{32}", hello["federation"])
        assert hello["name"] == "alice"
        assert hello["state"] == "running"
        assert (hello["strategy"], hello["needs"], hello["changes"]) == ("asgd", ["gradient"], [])
        assert (hello["length"], hello["encoding"], hello["lease"]) == (8, "float32", 600.0)
        assert hello["local"]["name"] == "sgd"
        assert (hello["steps"], hello["batch"]) == (1, 32)
        assert alice.hello() == hello  # a second one changes nothing
        status, job, body = alice.pull()
        assert (status, len(body)) == (200, 32)
        assert job["aflock-vectors"] == "model"
        assert (job["aflock-first"], job["aflock-number"]) == ("0", "0")
        assert job["content-type"] == "application/octet-stream"
        version = int(job["aflock-version"])
        status, receipt, body = alice.push(ONES)
        assert status == 200
        assert receipt["aflock-outcome"] == "applied"
        assert receipt["aflock-server-version"] == str(version + 1)
        assert json.loads(body) == {"outcome": "applied", "staleness": 0, "reason": "", "version": version + 1}
        status, model, weights = alice.request("GET", "/v1/model")
        assert (status, model["etag"], model["aflock-version"]) == (200, f'"{version + 1}"', str(version + 1))
        assert len(weights) == 32
        assert alice.pull()[1]["aflock-number"] == "1"
        assert alice.request("POST", "/v1/leave")[::2] == (200, b"{}")
        assert refusal(alice.pull()) == (403, "not-a-member")
        assert alice.hello()["number"] != hello["number"]  # somebody new, as far as the rule can tell
        assert alice.request("POST", "/v1/leave")[0] == 200


def test_the_next_job_comes_with_the_receipt(shared: Server) -> None:
    with working(shared, "nina") as nina:
        old = nina.job["aflock-job"]
        status, headers, body = nina.push(ONES, next=True)
        assert (status, len(body)) == (200, 32)
        assert headers["aflock-outcome"] == "applied"
        assert headers["aflock-job"] != old
        assert headers["aflock-version"] == headers["aflock-server-version"]


def test_a_client_that_pulls_again_has_lost_its_job(shared: Server) -> None:
    with working(shared, "petra") as petra:
        lost = petra.job["aflock-job"]
        assert petra.pull()[0] == 200
        assert petra.job["aflock-job"] != lost
        assert refusal(petra.push(ONES, job=lost)) == (409, "unknown-job")
        assert petra.push(ONES)[0] == 200


def test_an_update_counts_once(shared: Server) -> None:
    with working(shared, "olga") as olga:
        before = shared.status()["updates"]
        first = olga.push(ONES)
        for _ in range(3):
            assert olga.push(ONES * 2)[::2] == first[::2]  # whatever it says the second time
        assert shared.status()["updates"] == before + 1


def test_two_at_the_same_time_count_once(shared: Server) -> None:
    with working(shared, "olaf") as olaf:
        before, answers = shared.status()["updates"], []
        start = threading.Barrier(4)

        def push() -> None:
            with Peer(shared, olaf.token, job=olaf.job) as twin:
                start.wait()
                answers.append(twin.push(ONES)[::2])

        threads = [threading.Thread(target=push) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(answers) == 4
        assert len(set(answers)) == 1
        assert shared.status()["updates"] == before + 1


def test_a_torn_update_and_its_repetition_count_once(shared: Server) -> None:
    with working(shared, "otto") as otto, Wire(shared) as torn:
        before = shared.status()["updates"]
        head = update_head(otto, 32)
        torn.send(head + b"\0" * 16)
        time.sleep(0.1)
        whole = otto.push(ONES)
        assert whole[0] == 200
        torn.send(b"\0" * 16)  # the first one comes to its end after all
        assert torn.answer()[::2] == whole[::2]
        assert shared.status()["updates"] == before + 1


def test_a_version_the_client_has_is_not_sent_again(shared: Server) -> None:
    with working(shared, "harry") as harry:
        have = harry.job["aflock-version"]
        status, job, body = harry.pull(headers={"Aflock-Have": have})
        assert (status, body, job["aflock-vectors"]) == (200, b"", "")
        assert (job["aflock-version"], job["content-length"]) == (have, "0")
        assert len(harry.pull(headers={"Aflock-Have": str(int(have) + 1)})[2]) == 32
        status, headers, body = harry.request("GET", "/v1/model", headers={"If-None-Match": f'"{have}"'})
        assert (status, body, headers["etag"]) == (304, b"", f'"{have}"')
        assert harry.request("GET", "/v1/model", headers={"If-None-Match": '"x"'})[0] == 200


def test_a_job_can_be_given_back(shared: Server) -> None:
    with working(shared, "dora") as dora:
        job = dora.job["aflock-job"]
        dropped = shared.status()["dropped"]
        assert dora.request("POST", f"/v1/jobs/{job}/decline")[::2] == (200, b"{}")
        assert shared.status()["dropped"] == dropped + 1
        assert refusal(dora.request("POST", f"/v1/jobs/{job}/decline")) == (409, "unknown-job")
        assert refusal(dora.push(ONES)) == (409, "unknown-job")
        assert refusal(dora.request("POST", f"/v1/jobs/{job}/heartbeat")) == (409, "unknown-job")


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_place_that_gets_free_goes_to_who_waits(tmp_path: Path) -> None:
    with served(tmp_path / "fed", SMALL, changes=["federation.concurrency=1", "server.rate=50.0"]) as server:
        alice, bob = working(server, "alice"), joined(server, "bob")
        assert bob.pull()[0] == 204
        with Wire(server) as wire_:  # whoever asks for more meanwhile gets it afterwards; nonsense ends it
            wire_.send(b"GET /v1/job?wait=1 HTTP/1.1\r\nHost: x\r\n" + bearer(bob) + b"\r\n")
            wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01")
            assert wire_.answer()[0] == 204
            assert wire_.answer()[::2] == (200, b"ok\n")
            assert wire_.rest() == b""
        with waiting(bob, 30) as woken:
            time.sleep(0.3)
            assert alice.push(ONES)[0] == 200
            assert woken().status == 200
        with Peer(server, alice.token) as given_up, waiting(alice, 30) as replaced:
            time.sleep(0.3)
            with waiting(given_up, 1) as newer:  # another request of the same client: the older one goes away
                assert replaced().status == 204
                assert replaced().seconds < 10
                assert newer().status == 204
                assert newer().seconds >= 1
        assert server.status()["refused"] == {}
        with Wire(server) as hung_up:
            hung_up.send(b"GET /v1/job?wait=30 HTTP/1.1\r\nHost: x\r\n" + bearer(alice) + b"\r\n")
            time.sleep(0.3)
        time.sleep(0.3)
        assert bob.push(ONES)[0] == 200
        time.sleep(0.3)
        found = {client["name"]: client["state"] for client in server.status()["clients"]}
        assert found == {"alice": "idle", "bob": "idle"}  # nobody works for a client that has gone
        assert bob.pull()[0] == 200

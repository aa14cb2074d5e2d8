"""The rig's own check of signatures, against botocore's signer and AWS's published example."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastload_common.testing.rig import AccessKey, Rig
from fastload_common.testing.rig.sigv4 import SignedRequest, check_signature
from tests.common.testing.rig_client import DATA, NAME, Answer, ask, boto_client, part, sign

TARGET = f"/{NAME}"
TOKEN_KEY = AccessKey("TEMPORARY", "other-secret", token="the/token+=")


@pytest.fixture
def rig(rig: Rig) -> Rig:
    rig.allow_unsigned = False
    rig.keys[TOKEN_KEY.access_key] = TOKEN_KEY
    return rig


def code(answer: Answer) -> str:
    return answer.body.decode().partition("<Code>")[2].partition("<")[0]


def test_the_published_example() -> None:
    # From the documentation of S3: "Example: GET Object".
    scope = "AKIA" + "IOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
    signature = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    request = SignedRequest(
        "GET",
        "/test.txt",
        {
            "host": "examplebucket.s3.amazonaws.com",
            "range": "bytes=0-9",
            "x-amz-content-sha256": (
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
            ),
            "x-amz-date": "20130524T000000Z",
            "authorization": f"AWS4-HMAC-SHA256 Credential={scope},"
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
            f"Signature={signature}",
        },
    )
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    keys = {scope.partition("/")[0]: AccessKey("", secret)}
    assert check_signature(request, keys, now_wall_s=1_369_353_600.0, max_skew_s=0) is None
    late = check_signature(request, keys, now_wall_s=1_369_353_600.0 + 901, max_skew_s=900)
    assert late is not None
    assert late.code == "RequestTimeTooSkewed"


@pytest.mark.parametrize(
    "target", [TARGET, "/bucket?list-type=2&prefix=m%2F&delimiter=%2F", "/bucket/a%20b%2B%C3%BC"]
)
def test_right_signatures(rig: Rig, target: str) -> None:
    rig.put("bucket", "a b+ü", DATA)
    for region in ("us-east-1", "eu-north-1"):
        answer = ask(rig, target, sign(rig, "GET", target, region=region))
        assert answer.status == 200, answer.body
    assert rig.log.requests()[0].signed


def test_unsigned_requests_are_refused(rig: Rig) -> None:
    assert code(ask(rig)) == "AccessDenied"
    assert ask(rig, method="HEAD").status == 403
    rig.allow_unsigned = True
    assert ask(rig).status == 200
    # Who signs must sign well all the same.
    wrong = sign(rig, "GET", TARGET, key=AccessKey("KEY", "wrong"))
    assert code(ask(rig, headers=wrong)) == "SignatureDoesNotMatch"


def test_wrong_secrets_and_keys(rig: Rig) -> None:
    for key, expected in (
        (AccessKey("KEY", "wrong"), "SignatureDoesNotMatch"),
        (AccessKey("OTHER", "the-secret"), "InvalidAccessKeyId"),
    ):
        answer = ask(rig, headers=sign(rig, "GET", TARGET, key=key))
        assert (answer.status, code(answer)) == (403, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda headers: headers | {"Range": "bytes=0-9"},
        lambda headers: headers | {"X-Amz-Date": "20260101T000000Z"},
        lambda headers: headers | {"Host": "elsewhere"},
    ],
)
def test_what_is_signed_cannot_be_changed(
    rig: Rig, change: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    headers = sign(rig, "GET", TARGET, headers=part(0, 5) | {"Host": f"127.0.0.1:{rig.port}"})
    assert ask(rig, headers=headers).body == DATA[:5]
    assert ask(rig, headers=change(headers)).status in (400, 403)
    other = ask(rig, "/bucket/m/other", headers)
    assert code(other) == "SignatureDoesNotMatch"
    assert code(ask(rig, method="PUT", headers=headers)) == "SignatureDoesNotMatch"


def test_the_body_is_signed(rig: Rig) -> None:
    headers = sign(rig, "PUT", TARGET, body=b"right")
    assert ask(rig, headers=headers, method="PUT", body=b"wrong").status == 400
    assert ask(rig, headers=headers, method="PUT", body=b"right").status == 200


def test_session_tokens(rig: Rig) -> None:
    good = sign(rig, "GET", TARGET, key=TOKEN_KEY)
    assert ask(rig, headers=good).status == 200
    without = AccessKey(TOKEN_KEY.access_key, TOKEN_KEY.secret_key)
    assert code(ask(rig, headers=sign(rig, "GET", TARGET, key=without))) == "InvalidToken"
    rig.expire(TOKEN_KEY.access_key)
    expired = ask(rig, headers=good)
    assert (expired.status, code(expired)) == (400, "ExpiredToken")


def test_a_wrong_clock(rig: Rig) -> None:
    good = sign(rig, "GET", TARGET)
    for offset_s in (-901.0, 910.0):
        rig.clock_offset_s = offset_s
        answer = ask(rig, headers=good)
        assert (answer.status, code(answer)) == (403, "RequestTimeTooSkewed")
    rig.clock_offset_s = 600.0
    assert ask(rig, headers=good).status == 200


def test_another_region(rig: Rig) -> None:
    rig.regions["bucket"] = "eu-north-1"
    answer = ask(rig, headers=sign(rig, "GET", TARGET))
    assert (answer.status, code(answer)) == (301, "PermanentRedirect")
    assert answer.headers["x-amz-bucket-region"] == "eu-north-1"
    assert ask(rig, headers=sign(rig, "GET", TARGET, region="eu-north-1")).status == 200


def test_presigned_urls(rig: Rig) -> None:
    client = boto_client(rig.endpoint)
    arguments = {"Bucket": "bucket", "Key": "m/key"}
    url = client.generate_presigned_url("get_object", Params=arguments, ExpiresIn=60)
    client.close()
    target = url.removeprefix(rig.endpoint)
    assert "X-Amz-Signature=" in target
    assert ask(rig, target).body == DATA
    rig.clock_offset_s = 61.0
    rig.max_skew_s = 0.0
    assert code(ask(rig, target)) == "AccessDenied"
    rig.clock_offset_s = 0.0
    assert code(ask(rig, target.replace("m/key", "m/other"))) == "SignatureDoesNotMatch"


def test_boto3_is_told_of_a_wrong_secret(rig: Rig) -> None:
    client = boto_client(rig.endpoint, AccessKey("KEY", "wrong"))
    with pytest.raises(client.exceptions.ClientError, match="SignatureDoesNotMatch"):
        client.get_object(Bucket="bucket", Key="m/key")
    client.close()
    assert [(r.status, r.ended) for r in rig.log.gets()] == [(403, "refused")]

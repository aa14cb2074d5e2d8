"""What botocore raises, to our errors. Imports botocore when the first error is mapped.

What botocore says may hold request URLs; only the parts that are known to be harmless are shown.
"""

from __future__ import annotations

import re
from typing import Any

from fastload_common.config import environment
from fastload_common.errors import (
    AccessDeniedError,
    ConfigError,
    FastloadError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.source.s3_errors import MESSAGE_LIMIT, S3Fault, fault_error, parse_fault

__all__ = ["client_error", "fault_of"]

LOOKED_FOR = (
    "looked for: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE in the shared "
    "credentials and config files, AWS_ROLE_ARN with AWS_WEB_IDENTITY_TOKEN_FILE, the "
    "container's credential endpoint (AWS_CONTAINER_CREDENTIALS_*), the instance's role; "
    "for a public bucket set FASTLOAD_ANONYMOUS=1"
)
_ROLE_OPERATIONS = ("AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials")


def fault_of(error: Exception) -> S3Fault | None:
    """What the server said, if this error is a server's reply."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict) or "Error" not in response:
        return None
    said = response["Error"]
    metadata = response.get("ResponseMetadata", {})
    headers = {str(k).lower(): str(v) for k, v in metadata.get("HTTPHeaders", {}).items()}
    code = str(said.get("Code", ""))
    bare = parse_fault(int(metadata.get("HTTPStatusCode") or 0), headers, b"")
    return S3Fault(
        status=bare.status,
        # For replies without a body botocore puts the status here.
        code="" if code.isdecimal() else code,
        message=str(said.get("Message", ""))[:MESSAGE_LIMIT] if not code.isdecimal() else "",
        request_id=metadata.get("RequestId") or bare.request_id,
        region=bare.region or said.get("Region"),
        retry_after_s=bare.retry_after_s,
    )


def client_error(error: Exception, asked: str, **facts: Any) -> FastloadError:
    """The error to raise for whatever a botocore call raised.

    Args:
        asked: a verb phrase: ``list s3://bucket/prefix``.
        facts: fields: uri, endpoint, region, credentials.
    """
    if isinstance(error, FastloadError):
        error.fields |= facts | error.fields
        return error
    fault = fault_of(error)
    if fault is not None:
        operation = getattr(error, "operation_name", "")
        if operation in _ROLE_OPERATIONS:
            return _role_error(fault, operation, asked, facts)
        return fault_error(fault, asked, **facts)
    return _credential_error(error, asked, facts) or _other_error(error, asked, facts)


def _role_error(
    fault: S3Fault, operation: str, asked: str, facts: dict[str, Any]
) -> AccessDeniedError:
    said = f": {fault.message}" if fault.message else ""
    facts |= {"status": fault.status, "code": fault.code, "request_id": fault.request_id}
    if operation == "AssumeRoleWithWebIdentity":
        facts |= _web_identity()
    return AccessDeniedError(
        f"no credentials: {operation} failed{said}, so could not {asked}",
        hint="many ask STS at one moment: start fewer at once, or set AWS_MAX_ATTEMPTS higher"
        if fault.code.startswith("Throttl")
        else "check the role's trust policy and the token's audience",
        **facts,
    )


def _credential_error(error: Exception, asked: str, facts: dict[str, Any]) -> FastloadError | None:
    from botocore import exceptions as e

    if isinstance(error, e.NoCredentialsError | e.NoAuthTokenError):
        return AccessDeniedError(f"no credentials were found to {asked}", hint=LOOKED_FOR, **facts)
    if isinstance(error, e.PartialCredentialsError):
        return AccessDeniedError(
            f"only a part of the credentials was found to {asked}",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY together",
            **facts | {"missing": error.kwargs.get("cred_var")},
        )
    if isinstance(error, RuntimeError) and "still expired" in str(error):
        return AccessDeniedError(
            f"the session token has expired, and so have the credentials that replaced it: "
            f"could not {asked}",
            hint="see why whatever issues them gives old ones, and whether this clock is right",
            **facts,
        )
    if isinstance(error, e.ProfileNotFound):
        profile = error.kwargs.get("profile")
        return ConfigError(
            f"the AWS profile {profile!r} does not exist",
            hint="check AWS_PROFILE and the files that AWS_CONFIG_FILE and "
            "AWS_SHARED_CREDENTIALS_FILE name",
            **facts,
        )
    providers = (
        e.CredentialRetrievalError,
        e.TokenRetrievalError,
        e.UnknownCredentialError,
        e.MetadataRetrievalError,
        e.InfiniteLoopConfigError,
        e.RefreshWithMFAUnsupportedError,
        e.SSOError,
    )
    if isinstance(error, providers):
        return AccessDeniedError(
            f"the configured credentials could not be had to {asked}: {_said(error)}",
            **facts | _web_identity(),
        )
    return None


def _other_error(error: Exception, asked: str, facts: dict[str, Any]) -> FastloadError:
    from botocore import exceptions as e

    if isinstance(error, e.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error) or "certificate verify" in str(error):
            return SourceError(
                f"certificate verify failed: could not {asked}: {_said(error)}",
                hint="set AWS_CA_BUNDLE to the file of the authority that signed it",
                **facts,
            )
        return SourceUnavailableError(f"TLS failed: could not {asked}: {_said(error)}", **facts)
    if isinstance(error, e.HTTPClientError) and not _is_network(_inner(error)):
        # Such as a header that cannot be sent: asking again changes nothing.
        return SourceError(f"the request could not be made: could not {asked}", **facts)
    network = (e.ConnectionError, e.HTTPClientError, e.IncompleteReadError)
    if isinstance(error, network):
        return SourceUnavailableError(
            f"the endpoint was not reached: could not {asked}: {_said(error)}",
            hint="check AWS_ENDPOINT_URL, the region, DNS and the network policy",
            **facts,
        )
    configuration = (
        e.BaseEndpointResolverError,
        e.ConfigNotFound,
        e.ConfigParseError,
        e.EndpointProviderError,
        e.InvalidConfigError,
        e.InvalidS3AddressingStyleError,
        e.MissingDependencyException,
        e.ParamValidationError,
        e.UnsupportedS3ArnError,
        e.UnsupportedS3ConfigurationError,
        e.ValidationError,
    )
    # botocore checks the endpoint with a bare ValueError; a reply's numbers raise one, too.
    if isinstance(error, configuration) or (
        isinstance(error, ValueError) and "endpoint" in str(error)
    ):
        return ConfigError(
            f"could not {asked}: {_said(error)}",
            hint="these come from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION, and the "
            "profile in the file that AWS_CONFIG_FILE names",
            **facts,
        )
    if isinstance(error, OSError):
        return AccessDeniedError(
            f"a file of the AWS configuration could not be read: {error}",
            **facts | _web_identity(),
        )
    return SourceError(f"could not {asked}: {_said(error)}", **facts)


def _web_identity() -> dict[str, str | None]:
    """The role that the environment names, for messages; from a profile it is not known here."""
    environ = environment()
    names = {"role": "AWS_ROLE_ARN", "token_file": "AWS_WEB_IDENTITY_TOKEN_FILE"}
    return {field: environ.get(variable) for field, variable in names.items()}


def _inner(error: Exception) -> Exception:
    """What botocore wrapped, or the error itself."""
    inner = getattr(error, "kwargs", {}).get("error")
    return inner if isinstance(inner, Exception) else error


def _is_network(error: Exception) -> bool:
    """Whether it is of a kind whose text holds hosts, numbers and reasons, and no headers."""
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    return isinstance(error, OSError | HTTPError | BotoCoreError)


def _said(error: Exception) -> str:
    """The error's own words, without URLs' queries and Python objects, and not too many."""
    inner = _inner(error)
    if inner is not error and not _is_network(inner):
        return f"{type(error).__name__}: {type(inner).__name__}"
    text = re.sub(r"<[^<>]* object at 0x[0-9a-f]+>:?\s*", "", str(inner))
    text = re.sub(r"\?[^\s\"')]*", "", text)
    text = re.sub(r"://[^\s\"']*@", "://***@", text)
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"

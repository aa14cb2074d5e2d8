"""The fields of Karpenter's and EKS's own kinds that the examples use. Not a test itself.

Written from their reference pages: Karpenter v1 "NodePools" and "NodeClasses", EKS user guide
"Create a Node Class for Amazon EKS". Only what the examples use: a field that is not here is to be
looked up there and added here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CUSTOM", "problems"]

_TAGS = [{"tags": {"*": str}}]
_EBS = {"volumeSize": str, "volumeType": str, "iops": int, "throughput": int, "encrypted": bool}

_EC2_NODE_CLASS = {
    "role": str,
    "amiSelectorTerms": [{"alias": str}],
    "subnetSelectorTerms": _TAGS,
    "securityGroupSelectorTerms": _TAGS,
    "instanceStorePolicy": ("RAID0",),
    "blockDeviceMappings": [{"deviceName": str, "ebs": _EBS}],
    "metadataOptions": {
        "httpEndpoint": ("enabled", "disabled"),
        "httpPutResponseHopLimit": int,
        "httpTokens": ("required", "optional"),
    },
    "userData": str,
}
_NODE_CLASS = {
    "role": str,
    "subnetSelectorTerms": _TAGS,
    "securityGroupSelectorTerms": _TAGS,
    "ephemeralStorage": {"size": str, "iops": int, "throughput": int},
}
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte")
_NODE_POOL = {
    "template": {
        "metadata": {"labels": {"*": str}},
        "spec": {
            "nodeClassRef": {"group": str, "kind": str, "name": str},
            "taints": [
                {
                    "key": str,
                    "value": str,
                    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
                }
            ],
            "requirements": [{"key": str, "operator": _OPERATORS, "values": [str]}],
            "expireAfter": str,
            "terminationGracePeriod": str,
        },
    },
    "limits": {"*": str},
    "disruption": {
        "consolidationPolicy": ("WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"),
        "consolidateAfter": str,
        "budgets": [{"nodes": str}],
    },
}

CUSTOM: dict[tuple[str, str], Any] = {
    ("karpenter.k8s.aws/v1", "EC2NodeClass"): _EC2_NODE_CLASS,
    ("eks.amazonaws.com/v1", "NodeClass"): _NODE_CLASS,
    ("karpenter.sh/v1", "NodePool"): _NODE_POOL,
}


def problems(value: Any, shape: Any, where: str = "spec") -> list[str]:
    """What of a specification does not fit; one line each."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where}: expected a mapping, got {str(value)[:40]!r}"]
        found = []
        for key, item in value.items():
            inner = shape.get(key, shape.get("*"))
            if inner is None:
                found.append(f"{where}.{key}: no such field")
            else:
                found += problems(item, inner, f"{where}.{key}")
        return found
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: expected a list, got {str(value)[:40]!r}"]
        return [
            line
            for number, item in enumerate(value)
            for line in problems(item, shape[0], f"{where}[{number}]")
        ]
    if isinstance(shape, tuple):
        return [] if value in shape else [f"{where}: expected one of {shape}, got {value!r}"]
    return [] if type(value) is shape else [f"{where}: expected {shape.__name__}, got {value!r}"]

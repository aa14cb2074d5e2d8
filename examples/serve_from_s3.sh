#!/bin/sh
# Serve a model straight from S3 with vLLM.
#
#   AWS_REGION=eu-central-1 examples/serve_from_s3.sh s3://models/qwen3-8b --tensor-parallel-size 2
#
# Credentials: as for the AWS tools (a role, AWS_PROFILE, or AWS_ACCESS_KEY_ID and
# AWS_SECRET_ACCESS_KEY). Another S3 service: AWS_ENDPOINT_URL.
set -eu

model=${1:?usage: serve_from_s3.sh s3://bucket/model [arguments of vllm serve]}
shift

# Says in a second what would otherwise fail after a minute of imports.
fastload doctor "$model"

# Nothing may be looked up on a model hub: all files come from the prefix.
export HF_HUB_OFFLINE=1
# One line of JSON for each rank and load.
export FASTLOAD_REPORT=${FASTLOAD_REPORT:-/tmp/fastload-report.jsonl}

exec vllm serve "$model" --load-format fastload "$@"

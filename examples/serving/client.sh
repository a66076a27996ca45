#!/usr/bin/env bash
# Asks a server of `spec-decode serve` with curl: bash client.sh [http://127.0.0.1:8000] [KEY]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
key=${2:-none}

ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url$1" \
    --header "Authorization: Bearer $key" --header 'Content-Type: application/json' "${@:2}"
  echo
}

echo '# The models, their methods, and whether the server is healthy.'
ask /v1/models
ask /health

echo '# A completion, whole.'
ask /v1/completions --data '{"prompt": "def mean(values):\n", "max_tokens": 16, "temperature": 0}'

echo '# The same as a stream, with usage and figures of speculation in the last chunk.'
ask /v1/completions --data '{
  "prompt": "def mean(values):\n", "max_tokens": 16, "temperature": 0,
  "stream": true, "stream_options": {"include_usage": true}
}'

echo '# Plain decoding of one request, and an answer that matches a regular expression.'
ask /v1/completions --data '{
  "prompt": "def mean(values):\n", "max_tokens": 16, "temperature": 0, "speculative": {"enabled": false}
}'
ask /v1/completions --data '{
  "prompt": "# Is it a function?\n", "temperature": 0, "structured_outputs": {"regex": "yes|no"}
}'

echo '# How many draft tokens were accepted so far.'
ask /metrics | grep spec_decode_num_accepted_tokens_total

#!/usr/bin/env bash
# The endpoints of a running mesh, with nothing but curl.   examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
URL=${1:-http://127.0.0.1:8000}

ask() {  # ask PATH [JSON]
    printf '\n\n---- %s %s\n' "$1" "${2:-}"
    if (($# == 2)); then
        curl -sS --no-buffer "$URL$1" -H 'Content-Type: application/json' -d "$2"
    else
        curl -sS "$URL$1"
    fi
}

printf -- '---- /health: %s' "$(curl -sS -o /dev/null -w '%{http_code}' "$URL/health")"
ask /version
ask /v1/models
ask /v1/completions '{"prompt": "The morning was so fine, that", "max_tokens": 30}'
ask /v1/completions '{"prompt": ["Emma", "Elizabeth"], "max_tokens": 8, "temperature": 0}'
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello!"}], "max_completion_tokens": 30}'
ask /v1/completions '{"prompt": "Elizabeth", "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true}}'
ask /v1/responses '{"input": "Hello!", "max_output_tokens": 20}'
ask /v1/messages '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3, "stream": true}'
ask /v1/messages/count_tokens '{"messages": [{"role": "user", "content": "Hello!"}]}'
ask /v1/loads
ask /tokenize '{"prompt": "Mr. Darcy", "return_token_strs": true}'
ask /detokenize '{"tokens": [45, 46, 47]}'

printf '\n\n---- /metrics: requests that ended, by instance\n'
curl -sS "$URL/metrics" | grep '^vllm:request_success_total'
printf '\n---- a mistake gets one clear message\n'
curl -sS -w '\nstatus %{http_code}\n' "$URL/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "Emma", "temperature": -1}'

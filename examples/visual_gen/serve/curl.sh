#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The server by curl: an image, a video and its deletion. URL=http://host:port chooses the server,
# OUT=folder where the files go; FIELDS=', "num_inference_steps": 4' adds fields to the requests.
set -euo pipefail

URL=${URL:-http://127.0.0.1:8000}
OUT=${OUT:-.}
FIELDS=${FIELDS:-}
PROMPT='"prompt": "A robot arm folds a towel in a bright kitchen."'
curl=(curl --silent --show-error --fail-with-body)
if [ -n "${TRTLLM_SERVE_API_KEY:-}" ]; then
  curl+=(--header "Authorization: Bearer $TRTLLM_SERVE_API_KEY")
fi
json=(--header "Content-Type: application/json" --data)
value() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p"; }

echo "== image =="
"${curl[@]}" "$URL/v1/images/generations" "${json[@]}" "{$PROMPT $FIELDS}" >"$OUT/image.json"
"${curl[@]}" "$(value url <"$OUT/image.json")" --output "$OUT/image.png"

echo "== video, by one request that waits =="
"${curl[@]}" "$URL/v1/videos/sync" "${json[@]}" "{$PROMPT $FIELDS}" --output "$OUT/sync.mp4"

echo "== video, as a job =="
id=$("${curl[@]}" "$URL/v1/videos" "${json[@]}" "{$PROMPT $FIELDS}" | value id)
status=queued
until [ "$status" = completed ] || [ "$status" = failed ]; do
  sleep 1
  status=$("${curl[@]}" "$URL/v1/videos/$id" | value status)
  echo "$id: $status"
done
"${curl[@]}" "$URL/v1/videos/$id/content" --output "$OUT/job.mp4"

echo "== the first kilobyte, and deletion =="
"${curl[@]}" --range 0-1023 "$URL/v1/videos/$id/content" --output "$OUT/head.bin"
"${curl[@]}" --request DELETE "$URL/v1/videos/$id"
echo

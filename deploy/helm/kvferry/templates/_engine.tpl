{{/* Engines of others, with an adapter beside each. Their groups: under `engines` of a root a list of names and values. */}}
{{- define "kvferry.engines" -}}
{{- $made := list }}
{{- $names := dict }}
{{- range .Values.engines }}
{{- $values := mustMergeOverwrite (deepCopy $.Values.engineDefaults) (omit . "name" | deepCopy) }}
{{- if hasKey $names .name }}
{{- fail (printf "engines: two are called %s" .name) }}
{{- end }}
{{- $_ := set $names .name true }}
{{- $_ := set $values "model" ($values.model | default $.Values.model.name) }}
{{- include "kvferry.checkedEngine" (list $ .name $values) }}
{{- $made = append $made (dict "name" .name "values" $values) }}
{{- end }}
{{- toYaml (dict "engines" $made) }}
{{- end }}

{{/* Nothing; fails on values that contradict each other. Arguments: a root, an engine's name, its values. */}}
{{- define "kvferry.checkedEngine" -}}
{{- $root := index . 0 }}{{ $at := printf "engines: %s" (index . 1) }}{{ $values := index . 2 }}
{{- if not $values.image }}
{{- fail (printf "%s: image is missing; name the engine's image, such as vllm/vllm-openai:v0.32.0" $at) }}
{{- end }}
{{- if not (regexMatch "(:[^/:@]+|@sha256:[0-9a-f]{64})$" $values.image) }}
{{- fail (printf "%s: image %s has neither tag nor digest; adapters are written for certain versions of an engine" $at $values.image) }}
{{- end }}
{{- if not $root.Values.model.servedName }}
{{- fail (printf "%s: model.servedName is missing; routers find the nodes of a model by the name that clients use" $at) }}
{{- end }}
{{- if and (eq $values.engine "llamacpp") (not (hasSuffix ".gguf" $values.model)) }}
{{- fail (printf "%s: model is to be a GGUF file for llamacpp, not %s" $at $values.model) }}
{{- end }}
{{- if and (eq $values.engine "llamacpp") (gt (int $values.tensorParallelSize) 1) }}
{{- fail (printf "%s: tensorParallelSize is for vllm and sglang; llamacpp splits a model by its own flags in args" $at) }}
{{- end }}
{{- $gpus := int $values.gpus }}
{{- if and $gpus (lt $gpus (int $values.tensorParallelSize)) }}
{{- fail (printf "%s: gpus is %d, less than tensorParallelSize %d" $at $gpus (int $values.tensorParallelSize)) }}
{{- end }}
{{- $taken := list "host" "port" "model" "m" "model-path" "served-model-name" "alias" "a" "block-size" "page-size" "tensor-parallel-size" "tp" "tp-size" "enable-scale-out" "enable-prompt-tokens-details" "enable-metrics" "kv-events-config" "kv-transfer-config" "slots" "no-slots" "data-parallel-size" "dp" "dp-size" "api-key" "api-key-file" }}
{{- range $values.args }}
{{- $flag := splitList "=" . | first | splitList "." | first }}
{{- if and (hasPrefix "-" $flag) (has (trimAll "-" $flag | replace "_" "-") $taken) }}
{{- fail (printf "%s: args has %s; %s" $at $flag (ternary "an adapter serves an engine of one rank without a key: use replicas" "the chart sets it, for engine and adapter must agree" (has (trimAll "-" $flag) (list "data-parallel-size" "dp" "dp-size" "api-key" "api-key-file")))) }}
{{- end }}
{{- end }}
{{- if eq (int $values.port) 9001 }}
{{- fail (printf "%s: port 9001 is the adapter's" $at) }}
{{- end }}
{{- if and (eq $values.workload "StatefulSet") $values.cache.existingClaim }}
{{- fail (printf "%s: a StatefulSet has a claim for each pod; leave cache.existingClaim empty, or use a Deployment" $at) }}
{{- end }}
{{- if and $values.exposed.enabled (ne $root.Values.network.host "0.0.0.0") }}
{{- fail (printf "%s: exposed needs network.host 0.0.0.0, for the engine's URL holds the pod's address" $at) }}
{{- end }}
{{- if and $values.nixl.enabled (ne $values.engine "vllm") }}
{{- fail (printf "%s: nixl is for vllm" $at) }}
{{- end }}
{{- if and (eq $values.role "prefill") (not $values.nixl.enabled) }}
{{- fail (printf "%s: role prefill needs nixl.enabled: decode engines fetch its blocks by NIXL" $at) }}
{{- end }}
{{- $alone := and (not $root.Values.worker.enabled) (eq (len $root.Values.engines) 1) }}
{{- if and $values.autoscaling.enabled (ne $root.Values.autoscaling.kind "none") (not $alone) }}
{{- fail (printf "%s: autoscaling counts all nodes of the model, so these engines must be its only nodes: one group, and worker.enabled false" $at) }}
{{- end }}
{{- end }}

{{/* As the root of a pool, for one group of engines: its GPUs are those of the group. Arguments: a root, a group. */}}
{{- define "kvferry.engineRoot" -}}
{{- $root := index . 0 | deepCopy }}{{ $group := index . 1 }}
{{- range list "gpuResource" "gpuNodes" }}
{{- $_ := set $root.Values.worker . (get $group.values .) }}
{{- end }}
{{- toYaml (set $root "engine" $group.name) }}
{{- end }}

{{/* What names of its objects begin with. */}}
{{- define "kvferry.engineName" -}}
{{- include "kvferry.short" (printf "%s-engine-%s" (include "kvferry.poolName" .) .engine) }}
{{- end }}

{{/* Whether any pool of the release has engines, or workers of its own. */}}
{{- define "kvferry.hasEngines" -}}
{{- range (include "kvferry.pools" . | fromYaml).pools }}{{ if .values.engines }}yes{{ end }}{{ end }}
{{- end }}
{{- define "kvferry.hasWorkers" -}}
{{- range (include "kvferry.pools" . | fromYaml).pools }}{{ if .values.worker.enabled }}yes{{ end }}{{ end }}
{{- end }}

{{/* The sockets of KV events, in a folder that engine and adapter share. */}}
{{- define "kvferry.eventsEndpoint" -}}ipc:///run/kvferry/engine/events{{- end }}
{{- define "kvferry.replayEndpoint" -}}ipc:///run/kvferry/engine/replay{{- end }}

{{- define "kvferry.engineCommand" -}}
{{- $known := dict "vllm" (list "python3" "-m" "vllm.entrypoints.openai.api_server") "sglang" (list "python3" "-m" "sglang.launch_server") "llamacpp" (list "/app/llama-server") }}
{{- .values.command | default (index $known .values.engine) | toYaml }}
{{- end }}

{{/* Its flags; those of `kvferry serve`, and a test compares them. */}}
{{- define "kvferry.engineArgs" -}}
{{- $values := .values }}
{{- $name := splitList "," .root.Values.model.servedName | first }}
{{- $events := dict "publisher" "zmq" "endpoint" (include "kvferry.eventsEndpoint" .) "replay_endpoint" (include "kvferry.replayEndpoint" .) "buffer_steps" 10000 }}
{{- $host := ternary .root.Values.network.host "127.0.0.1" $values.exposed.enabled }}
{{- $flags := list "--host" $host "--port" (toString (int $values.port)) }}
{{- if eq $values.engine "vllm" }}
{{- $flags = concat $flags (list "--model" $values.model "--served-model-name" $name "--enable-scale-out" "--enable-prompt-tokens-details" "--kv-events-config" (toJson (set $events "enable_kv_cache_events" true))) }}
{{- if $values.nixl.enabled }}{{ $flags = concat $flags (list "--kv-transfer-config" (include "kvferry.nixl" $values)) }}{{ end }}
{{- with $values.blockSize }}{{ $flags = concat $flags (list "--block-size" (toString (int .))) }}{{ end }}
{{- if gt (int $values.tensorParallelSize) 1 }}{{ $flags = concat $flags (list "--tensor-parallel-size" (toString (int $values.tensorParallelSize))) }}{{ end }}
{{- else if eq $values.engine "sglang" }}
{{- $flags = concat $flags (list "--model-path" $values.model "--served-model-name" $name "--enable-metrics" "--kv-events-config" (toJson $events)) }}
{{- with $values.blockSize }}{{ $flags = concat $flags (list "--page-size" (toString (int .))) }}{{ end }}
{{- if gt (int $values.tensorParallelSize) 1 }}{{ $flags = concat $flags (list "--tp-size" (toString (int $values.tensorParallelSize))) }}{{ end }}
{{- else }}
{{- $flags = concat $flags (list "-m" $values.model "--alias" $name "--slots") }}
{{- end }}
{{- concat $flags $values.args | toYaml }}
{{- end }}

{{/* vLLM's kv_transfer_config, as `kvferry serve` passes it: blocks that cannot be fetched are computed. */}}
{{- define "kvferry.nixl" -}}
{{- dict "kv_connector" "NixlConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" (dict "kv_lease_duration" (int .nixl.leaseSeconds)) | toJson }}
{{- end }}

{{/* What it asks for, with its GPUs. */}}
{{- define "kvferry.engineResources" -}}
{{- $resources := deepCopy .values.resources }}
{{- if int .values.gpus }}
{{- range list "requests" "limits" }}
{{- $_ := set $resources . (merge (dict $.values.gpuResource (int $.values.gpus)) (get $resources . | default dict)) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "kvferry.engineHealth" -}}
{{- $url := printf "http://127.0.0.1:%d/health" (int .values.port) }}
{{- $asked := list "python3" "-c" (printf "import urllib.request; urllib.request.urlopen('%s', timeout=8)" $url) }}
{{- if eq .values.engine "llamacpp" }}{{ $asked = list "curl" "--fail" "--silent" "--max-time" "8" $url }}{{ end }}
{{- .values.healthCommand | default $asked | toYaml }}
{{- end }}

{{- define "kvferry.hasNixl" -}}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- $root := include "kvferry.root" (list $ .) | fromYaml }}
{{- range (include "kvferry.engines" $root | fromYaml).engines }}{{ if .values.nixl.enabled }}yes{{ end }}{{ end }}
{{- end }}
{{- end }}

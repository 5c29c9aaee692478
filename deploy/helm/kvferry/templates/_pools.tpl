{{/* Pools of the release, each a model with its prefill and decode nodes: under `pools` a list of names and values. Without
`.Values.pools` there is one, which has no name. Who renders one takes its root from `kvferry.root`. */}}
{{- define "kvferry.pools" -}}
{{- $made := list }}
{{- $models := dict }}
{{- if and .Values.pools .Values.engines }}
{{- fail "engines: with pools, each pool has engines of its own: pools[].engines" }}
{{- end }}
{{- range .Values.pools }}
{{- $values := mustMergeOverwrite (deepCopy (omit $.Values "pools")) (omit . "name" | deepCopy) }}
{{- $_ := required (printf "pools: %s: model.servedName is what clients call it" .name) $values.model.servedName }}
{{- range splitList "," $values.model.servedName }}
{{- if hasKey $models . }}
{{- fail (printf "pools: two models are called %s" .) }}
{{- end }}
{{- $_ := set $models . true }}
{{- end }}
{{- $made = append $made (dict "name" .name "values" $values) }}
{{- end }}
{{- toYaml (dict "pools" ($made | default (list (dict "name" "" "values" (omit .Values "pools"))))) }}
{{- end }}

{{/* As $ of the release, for one pool. Arguments: $, a pool. */}}
{{- define "kvferry.root" -}}
{{- $release := index . 0 }}
{{- toYaml (dict "Values" (index . 1).values "pool" (index . 1).name "Release" (dict "Name" $release.Release.Name "Namespace" $release.Release.Namespace "Service" $release.Release.Service) "Chart" (dict "Name" $release.Chart.Name "Version" $release.Chart.Version "AppVersion" $release.Chart.AppVersion)) }}
{{- end }}

{{/* The roles of its own nodes, apart from engines: encode nodes only where a pool has any. */}}
{{- define "kvferry.roles" -}}
{{- $roles := "prefill decode" }}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- if int .values.encode.replicas }}{{ $roles = "prefill decode encode" }}{{ end }}
{{- end }}
{{- $roles }}
{{- end }}

{{/* What names of a pool's objects begin with. */}}
{{- define "kvferry.poolName" -}}
{{- if .pool }}{{ include "kvferry.short" (printf "%s-%s" (include "kvferry.fullname" .) .pool) }}{{ else }}{{ include "kvferry.fullname" . }}{{ end }}
{{- end }}

{{/* Seconds that any of its models may take to load. */}}
{{- define "kvferry.longestStart" -}}
{{- $longest := 0 }}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- $longest = max $longest (int .values.worker.startupSeconds) }}
{{- range .values.engines }}{{ $longest = max $longest (int (.startupSeconds | default $.Values.engineDefaults.startupSeconds)) }}{{ end }}
{{- end }}
{{- $longest }}
{{- end }}

{{/* The models that a root has: a pool's own, or all of the release. */}}
{{- define "kvferry.models" -}}
{{- $names := list }}{{ $served := list }}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- $names = append $names .values.model.name }}
{{- with .values.model.servedName }}{{ $served = append $served . }}{{ end }}
{{- end }}
KVFERRY_MODEL: {{ join " " $names | quote }}
{{- with $served }}
KVFERRY_SERVED_MODEL_NAME: {{ join " " . | quote }}
{{- end }}
{{- end }}

{{/* Names carry the release, so that several fit into one namespace; 50 characters leave room for what follows. */}}
{{- define "kvferry.fullname" -}}
{{- include "kvferry.short" (.Values.fullnameOverride | default (ternary .Release.Name (printf "%s-kvferry" .Release.Name) (contains "kvferry" .Release.Name))) }}
{{- end }}

{{- define "kvferry.short" -}}
{{- if gt (len .) 50 }}{{ printf "%s-%s" (trunc 41 . | trimSuffix "-") (sha256sum . | trunc 8) }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* What a Deployment, a Service or a policy finds pods by. Arguments: the root (of the release, or of a pool), a
component; "" for all. */}}
{{- define "kvferry.selector" -}}
app.kubernetes.io/name: kvferry
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- with (index . 0).pool }}
kvferry/pool: {{ . }}
{{- end }}
{{- with (index . 0).engine }}
kvferry/engine: {{ . }}
{{- end }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "kvferry.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvferry.selector" . }}
app.kubernetes.io/part-of: kvferry
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Pods of the cluster, which may talk to workers and to Redis. Arguments: the root, further components. */}}
{{- define "kvferry.members" -}}
podSelector:
  matchLabels: {{- include "kvferry.selector" (list (index . 0) "") | nindent 4 }}
  matchExpressions: [{key: app.kubernetes.io/component, operator: In, values: [{{ concat (list "router") (include "kvferry.roles" (index . 0) | splitList " ") (slice . 1) | join ", " }}]}]
{{- end }}

{{- define "kvferry.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "kvferry.fullname" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{/* Arguments: the root, "router" or "worker". */}}
{{- define "kvferry.image" -}}
{{- $root := index . 0 }}{{ $image := index $root.Values.images (index . 1) }}
{{- $tag := $image.tag | default $root.Values.images.tag | default $root.Chart.AppVersion }}
{{- $name := empty $root.Values.images.registry | ternary $image.repository (printf "%s/%s" $root.Values.images.registry $image.repository) }}
{{- empty $image.digest | ternary (printf "%s:%s" $name $tag) (printf "%s@%s" $name $image.digest) }}
{{- end }}

{{- define "kvferry.clusterSecret" -}}
{{ .Values.cluster.secret.existingSecret | default (printf "%s-cluster-secret" (include "kvferry.fullname" .)) }}
{{- end }}

{{/* Clusters that share a Redis are told apart by their name; a Redis of our own holds one. */}}
{{- define "kvferry.clusterName" -}}
{{- $shared := printf "%s.%s" .Release.Namespace (include "kvferry.fullname" .) }}
{{- .Values.cluster.name | default (ternary "default" $shared .Values.redis.enabled) }}
{{- end }}

{{/* The Secret with the password of Redis: its name, a slash, its key. Empty: the URL has it, or there is none. */}}
{{- define "kvferry.redisPassword" -}}
{{- $external := .Values.externalRedis.passwordSecret }}
{{- if .Values.redis.enabled }}{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "kvferry.fullname" .)) }}/{{ .Values.redis.secretKey }}
{{- else if $external.name }}{{ $external.name }}/{{ $external.key }}{{ end }}
{{- end }}

{{/* The Secret with the authority of Redis' certificate, in the same way. */}}
{{- define "kvferry.redisAuthority" -}}
{{- if .Values.redis.enabled }}{{ with .Values.redis.tls.secretName }}{{ . }}/ca.crt{{ end }}
{{- else }}{{ with .Values.externalRedis.caSecret }}{{ if .name }}{{ .name }}/{{ .key }}{{ end }}{{ end }}{{ end }}
{{- end }}

{{/* Empty where a Secret holds it. */}}
{{- define "kvferry.redisUrl" -}}
{{- $external := .Values.externalRedis }}
{{- $url := $external.url }}
{{- if .Values.redis.enabled }}
{{- $scheme := empty .Values.redis.tls.secretName | ternary "redis" "rediss" }}
{{- $url = printf "%s://kvferry@%s-redis:6379/0" $scheme (include "kvferry.fullname" .) }}
{{- else if not (or $url $external.urlSecret.name) }}
{{- fail "redis.enabled is false: give externalRedis.url, or externalRedis.urlSecret.name where the URL has a password" }}
{{- else if and $url $external.urlSecret.name }}
{{- fail "externalRedis.url and externalRedis.urlSecret.name: give one of them" }}
{{- else if regexMatch "://[^/@]*:[^/]*@|[?&](sentinel_)?password=" $url }}
{{- fail "externalRedis.url has a password, which does not belong in a ConfigMap: give externalRedis.urlSecret or passwordSecret" }}
{{- end }}
{{- $url }}
{{- if and $url (include "kvferry.redisAuthority" .) }}{{ contains "?" $url | ternary "&" "?" }}ssl_ca_certs=/run/kvferry/redis-ca/ca.crt{{ end }}
{{- end }}

{{/* What every process is told; a change rolls the pods. Of several pools' models the router is told all, in order. */}}
{{- define "kvferry.clusterSettings" -}}
{{- include "kvferry.models" . }}
{{- with include "kvferry.redisUrl" . }}
KVFERRY_REDIS_URL: {{ . | quote }}
{{- end }}
{{- if include "kvferry.redisPassword" . }}
KVFERRY_REDIS_PASSWORD_FILE: /run/kvferry/redis/password
{{- end }}
KVFERRY_CLUSTER: {{ include "kvferry.clusterName" . | quote }}
KVFERRY_LOG_LEVEL: {{ .Values.log.level }}
{{- /* Where KEDA scales to zero, a request waits for a node to start. */}}
{{- with .Values.router.queueTimeout | default (ternary 120 0 (eq .Values.autoscaling.kind "keda")) }}
KVFERRY_QUEUE_TIMEOUT: {{ . | quote }}
{{- end }}
{{- with .Values.log.format }}
KVFERRY_LOG_FORMAT: {{ . }}
{{- end }}
{{- with .Values.tracing.endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "kvferry.workerSettings" -}}
{{- if .pool }}
{{- include "kvferry.models" . }}
{{ end }}
{{- with .Values.worker -}}
KVFERRY_DEVICE: {{ .device }}
KVFERRY_DTYPE: {{ .dtype }}
KVFERRY_BLOCK_SIZE: {{ .blockSize | quote }}
{{- if .kvCacheGib }}
KVFERRY_KV_CACHE_GIB: {{ .kvCacheGib | quote }}
{{- end }}
{{- if gt (int .tensorParallelSize) 1 }}
KVFERRY_TENSOR_PARALLEL_SIZE: {{ .tensorParallelSize | quote }}
{{- end }}
{{- if .expertParallel }}
{{- if lt (int .tensorParallelSize) 2 }}
{{- fail "worker.expertParallel: worker.tensorParallelSize must be 2 or more" }}
{{- end }}
KVFERRY_ENABLE_EXPERT_PARALLEL: "true"
{{- end }}
{{- if .kvHost.gib }}
{{- if not (or (int .gpus) (hasPrefix "cuda" .device)) }}
{{- fail "worker.kvHost.gib: pools on a CPU are in host memory themselves: raise worker.kvCacheGib" }}
{{- end }}
KVFERRY_KV_HOST_GIB: {{ .kvHost.gib | quote }}
{{- end }}
{{- if .kvDisk.gib }}
KVFERRY_KV_DISK_PATH: /kv-disk
KVFERRY_KV_DISK_GIB: {{ .kvDisk.gib | quote }}
{{- end }}
{{- if .kvRemote.url }}
KVFERRY_KV_REMOTE_URL: {{ .kvRemote.url | quote }}
KVFERRY_KV_REMOTE_GIB: {{ .kvRemote.gib | quote }}
{{- end }}
KVFERRY_UCX_TRANSPORTS: {{ .ucxTransports | quote }}
{{- with .ucxNetDevices }}
KVFERRY_UCX_NET_DEVICES: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvferry.families" -}}
ipFamilyPolicy: {{ .Values.network.ipFamilyPolicy }}
{{- with .Values.network.ipFamilies }}
ipFamilies: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What a Deployment is called and found by. Arguments everywhere here: a dict of root, component and values. */}}
{{- define "kvferry.deploymentHead" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "kvferry.poolName" .root }}-{{ .component }}
  labels: {{- include "kvferry.labels" (list .root .component) | nindent 4 }}
{{- end }}

{{- define "kvferry.podMetadata" -}}
labels:
  {{- /* Without the chart's version: another chart alone rolls no pods. */}}
  {{- include "kvferry.selector" (list .root .component) | nindent 2 }}
  app.kubernetes.io/part-of: kvferry
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $port := dict "router" "8000" "prefill" "9000" "decode" "9001" "encode" "9002" "engine" "9001" }}
{{- if or .values.podAnnotations (hasKey $port .component) }}
annotations:
  {{- if .root.pool }}
  kvferry/model: {{ splitList "," .root.Values.model.servedName | first | quote }}
  {{- end }}
  {{- if hasKey $port .component }}
  {{- $settings := include "kvferry.clusterSettings" .root }}
  {{- if ne .component "engine" }}{{ $settings = printf "%s%s" $settings (include "kvferry.workerSettings" .root) }}{{ end }}
  checksum/settings: {{ sha256sum $settings }}
  {{- if .root.Values.monitoring.annotations }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ index $port .component | quote }}
  prometheus.io/path: /metrics
  {{- end }}
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Who a pod runs as, and where. `user`: of its image. */}}
{{- define "kvferry.podCommon" -}}
serviceAccountName: {{ .values.serviceAccountName | default (include "kvferry.serviceAccount" .root) }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 10001 }}
  runAsGroup: {{ .user | default 10001 }}
  {{- if not .user }}
  fsGroup: 10001
  {{- end }}
  {{- if eq .component "model" }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName | default (include "kvferry.priorityClass" .) }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .values.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := .values.tolerations | default list }}
{{- if .gpus }}
{{- $tolerations = append $tolerations (dict "key" .root.Values.worker.gpuResource "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := .values.affinity | default dict }}
{{- if and .other .root.Values.worker.nearEachOther (not $affinity) }}
{{- $found := dict "matchLabels" (fromYaml (include "kvferry.selector" (list .root .other))) }}
{{- $terms := list }}
{{- $weight := 100 }}
{{- range (kindIs "string" .root.Values.worker.nearEachOther | ternary (list .root.Values.worker.nearEachOther) .root.Values.worker.nearEachOther) }}
{{- $terms = append $terms (dict "weight" $weight "podAffinityTerm" (dict "topologyKey" . "labelSelector" $found)) }}
{{- $weight = div $weight 2 }}
{{- end }}
{{- $affinity = dict "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $terms) }}
{{- end }}
{{- if .gpus }}
{{- $affinity = mergeOverwrite (fromYaml (include "kvferry.gpuNodes" .root)) $affinity }}
{{- end }}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
{{- $found := fromYaml (include "kvferry.selector" (list $.root $.component)) }}
topologySpreadConstraints:
  {{- range . }}
  - {{- merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $found)) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Of the release, for pods that name none. */}}
{{- define "kvferry.priorityClass" -}}
{{- if and .root.Values.priorityClass.create (has .component (list "router" "prefill" "decode" "encode" "engine" "redis")) }}
{{- .root.Values.priorityClass.name | default (include "kvferry.fullname" .root) }}
{{- end }}
{{- end }}

{{/* Machines by the labels of NVIDIA's GPU feature discovery. One that does not tell its driver is not left out for it. */}}
{{- define "kvferry.gpuNodes" -}}
{{- $wanted := .Values.worker.gpuNodes }}
{{- $common := list }}
{{- with $wanted.products }}
{{- $common = append $common (dict "key" "nvidia.com/gpu.product" "operator" "In" "values" .) }}
{{- end }}
{{- $terms := list $common }}
{{- with int $wanted.leastDriver }}
{{- $driver := "nvidia.com/cuda.driver-version.major" }}
{{- $new := dict "key" $driver "operator" "Gt" "values" (list (printf "%d" (sub . 1))) }}
{{- $terms = list (append $common $new) (append $common (dict "key" $driver "operator" "DoesNotExist")) }}
{{- end }}
{{- if index $terms 0 }}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range $terms }}
      - matchExpressions: {{- toYaml . | nindent 10 }}
      {{- end }}
{{- end }}
{{- end }}

{{/* Of a container. `rdma`: whether it pins memory. */}}
{{- define "kvferry.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if .rdma }}
    add: [IPC_LOCK]
    {{- end }}
{{- with .root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "kvferry.replicas" -}}
{{- if not (include "kvferry.scaled" .) }}
replicas: {{ .values.replicas }}
{{- end }}
{{- end }}

{{/* Whether an autoscaler owns its replicas. */}}
{{- define "kvferry.scaled" -}}
{{- $scaling := .root.Values.autoscaling }}
{{- $kserve := and (has .component (list "prefill" "decode")) (eq .root.Values.worker.workload "LLMInferenceService") }}
{{- $own := get $scaling .component }}
{{- if eq .component "engine" }}{{ $own = .values.autoscaling }}{{ end }}
{{- if and (ne $scaling.kind "none") $own (not $kserve) }}{{ if $own.enabled }}yes{{ end }}{{ end }}
{{- end }}

{{/* Where clients' files and batches are. Argument: the root. */}}
{{- define "kvferry.filesStore" -}}
{{- $router := .Values.router }}
{{- $several := or (gt (int $router.replicas) 1) (include "kvferry.scaled" (dict "root" . "component" "router" "values" $router)) }}
{{- if $router.filesStore }}{{ $router.filesStore }}
{{- else if and $several (not $router.filesVolume.existingClaim) }}redis
{{- else }}disk{{ end }}
{{- end }}

{{/* Environment of a process of the cluster; `worker`, `adapter`: whether it is one. */}}
{{- define "kvferry.environment" -}}
envFrom:
  - configMapRef: {name: {{ include "kvferry.fullname" .root }}-cluster}
  {{- if .worker }}
  - configMapRef: {name: {{ include "kvferry.poolName" .root }}-worker}
  {{- end }}
  {{- with .values.extraEnvFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - {name: KVFERRY_CLUSTER_SECRET_FILE, value: /run/kvferry/cluster-secret/secret}
  {{- with .root.Values.externalRedis.urlSecret }}
  {{- if and .name (not $.root.Values.redis.enabled) }}
  - name: KVFERRY_REDIS_URL
    valueFrom:
      secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
  {{- end }}
  {{- end }}
  {{- if or .worker .adapter }}
  - name: KVFERRY_NODE_ID
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: KVFERRY_ADVERTISE_HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- else }}
  {{- if .root.Values.apiKeys.existingSecret }}
  - {name: KVFERRY_API_KEYS, value: /run/kvferry/api-keys/keys.toml}
  {{- end }}
  {{- with .root.Values.apiKeys.operatorSecret }}
  {{- if .name }}
  - name: KVFERRY_API_KEY
    valueFrom:
      secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
  {{- end }}
  {{- end }}
  {{- if .values.tls.secretName }}
  - {name: KVFERRY_SSL_CERTFILE, value: /run/kvferry/tls/tls.crt}
  - {name: KVFERRY_SSL_KEYFILE, value: /run/kvferry/tls/tls.key}
  {{- end }}
  {{- end }}
  {{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "kvferry.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .worker }}
- {name: shm, mountPath: /dev/shm}
{{- if .root.Values.worker.kvDisk.gib }}
- {name: kv-disk, mountPath: /kv-disk}
{{- end }}
{{- end }}
{{ include "kvferry.secretMounts" .root | trim }}
{{- with include "kvferry.modelMounts" .root | trim }}
{{ . }}
{{- end }}
{{- if not .worker }}
{{- if .root.Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /run/kvferry/api-keys, readOnly: true}
{{- end }}
{{- if .values.tls.secretName }}
- {name: tls, mountPath: /run/kvferry/tls, readOnly: true}
{{- end }}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Secrets of every process. Argument: the root. */}}
{{- define "kvferry.secretMounts" -}}
{{- if include "kvferry.redisPassword" . }}
- {name: redis, mountPath: /run/kvferry/redis, readOnly: true}
{{- end }}
- {name: cluster-secret, mountPath: /run/kvferry/cluster-secret, readOnly: true}
{{- if include "kvferry.redisAuthority" . }}
- {name: redis-ca, mountPath: /run/kvferry/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvferry.secretVolumes" -}}
{{- with include "kvferry.redisPassword" . }}
{{- $secret := splitList "/" . }}
- {name: redis, secret: {secretName: {{ index $secret 0 }}, items: [{key: {{ index $secret 1 }}, path: password}]}}
{{- end }}
- {name: cluster-secret, secret: {secretName: {{ include "kvferry.clusterSecret" . }}, items: [{key: {{ .Values.cluster.secret.key }}, path: secret}]}}
{{- with include "kvferry.redisAuthority" . }}
{{- $secret := splitList "/" . }}
- {name: redis-ca, secret: {secretName: {{ index $secret 0 }}, items: [{key: {{ index $secret 1 }}, path: ca.crt}]}}
{{- end }}
{{- end }}

{{- define "kvferry.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: {{ .values.tmpSize | default .root.Values.worker.tmpSize }}}}
{{- if .worker }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.worker.sharedMemory }}}}
{{- with .root.Values.worker.kvDisk }}
{{- if .gib }}
{{- /* With room for rounding and for the files that are being written: a pod that goes beyond it is evicted. */}}
{{- $volume := .volume | default (dict "emptyDir" (dict "sizeLimit" (printf "%dGi" (add1 (ceil (mulf (float64 .gib) 1.1) | int))))) }}
- {{- merge (dict "name" "kv-disk") $volume | toYaml | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
{{ include "kvferry.secretVolumes" .root | trim }}
{{- with include "kvferry.modelVolumes" .root | trim }}
{{ . }}
{{- end }}
{{- if not .worker }}
{{- with .root.Values.apiKeys }}
{{- if .existingSecret }}
- {name: api-keys, secret: {secretName: {{ .existingSecret }}, items: [{key: {{ .key }}, path: keys.toml}]}}
{{- end }}
{{- end }}
{{- with .values.tls.secretName }}
- {name: tls, secret: {secretName: {{ . }}}}
{{- end }}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Before the process: its models are whole. */}}
{{- define "kvferry.initContainers" -}}
{{- $waits := include "kvferry.modelWaits" . | trim }}
{{- if or .values.initContainers $waits }}
initContainers:
  {{- with $waits }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .values.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

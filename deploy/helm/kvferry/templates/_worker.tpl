{{/* A worker's pod: `template` of whatever makes it. Arguments: as everywhere in _pod.tpl, with the role's own `ports`. */}}
{{- define "kvferry.workerPod" -}}
{{- $scope := . }}{{- $root := .root }}{{- $role := .component }}{{- $port := .ports }}
{{- $resources := include "kvferry.workerResources" . | fromYaml }}
{{- with .values -}}
metadata: {{- include "kvferry.podMetadata" $scope | nindent 2 }}
spec:
  {{- include "kvferry.podCommon" $scope | nindent 2 }}
  # --drain-timeout + 15 s to leave the registry and close the link. No preStop: on SIGTERM the node tells the
  # routers itself, through its lease.
  terminationGracePeriodSeconds: {{ add .drainTimeout 15 }}
  {{- include "kvferry.initContainers" $scope | nindent 2 }}
  containers:
    - name: {{ $scope.container | default $role }}
      image: {{ include "kvferry.image" (list $root "worker") }}
      {{- with $scope.command }}
      command: {{- toYaml . | nindent 8 }}
      {{- end }}
      args:
        - {{ $role }}
        - "--host={{ $root.Values.network.host }}"
        - --port={{ index $port 0 }}
        - --link-port={{ index $port 1 }}
        - --drain-timeout={{ .drainTimeout }}
        {{- if gt (int .nnodes) 1 }}
        - --nnodes={{ .nnodes }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port=29500
        {{- end }}
        {{- with .grantTimeout }}
        - --grant-timeout={{ . }}
        {{- end }}
        {{- with .maxNumSeqs }}
        - --max-num-seqs={{ . }}
        {{- end }}
        {{- range .extraArgs }}
        - {{ . | quote }}
        {{- end }}
      {{- include "kvferry.environment" $scope | nindent 6 }}
      ports:
        - {name: http, containerPort: {{ index $port 0 }}}
        - {name: link, containerPort: {{ index $port 1 }}}
        {{- if gt (int .nnodes) 1 }}
        - {name: hosts, containerPort: 29500}
        {{- end }}
      # /health answers while the model loads; /ready only after it.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div $root.Values.worker.startupSeconds 5 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 2
      # A process that hangs is replaced within 70 s: 4 * 10 + 10 + 10. Its streams continue on other nodes, so it gets no
      # grace period.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 4
        terminationGracePeriodSeconds: 10
      resources: {{- toYaml $resources | nindent 8 }}
      {{- include "kvferry.confined" $scope | nindent 6 }}
      volumeMounts: {{- include "kvferry.mounts" $scope | nindent 8 }}
    {{- with .sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes: {{- include "kvferry.volumes" $scope | nindent 4 }}
{{- end }}
{{- end }}

{{/* What it asks for, with its GPUs and its RDMA devices. */}}
{{- define "kvferry.workerResources" -}}
{{- $resources := deepCopy .values.resources }}
{{- $ranks := div (int .root.Values.worker.tensorParallelSize) (int (default 1 .values.nnodes)) }}
{{- $devices := dict }}
{{- with .root.Values.worker }}
{{- if int .gpus }}{{ $_ := set $devices .gpuResource (max (int .gpus) $ranks) }}{{ end }}
{{- if .rdma.resource }}{{ $_ := set $devices .rdma.resource (int .rdma.count) }}{{ end }}
{{- end }}
{{- range list "requests" "limits" }}
{{- $_ := set $resources . (merge (deepCopy $devices) (get $resources . | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* A role of a LeaderWorkerSet or a DisaggregatedSet: a group is a node, of as many pods as it has hosts. What restarts in
place is a new epoch of the same node, and its hosts meet again by themselves, so nothing need be made anew. */}}
{{- define "kvferry.workerGroup" -}}
{{- if ne (.values.strategy.type | default "RollingUpdate") "RollingUpdate" }}
{{- fail (printf "%s.strategy.type: a %s rolls" .component .root.Values.worker.workload) }}
{{- end }}
{{- include "kvferry.replicas" . | trim }}
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {{- toYaml (.values.strategy.rollingUpdate | default dict) | nindent 4 }}
leaderWorkerTemplate:
  size: {{ default 1 .values.nnodes }}
  restartPolicy: None
  workerTemplate:
    {{- include "kvferry.workerPod" . | nindent 4 }}
{{- end }}

{{/* A role of KServe, which knows the container as `main` and has a command of its own for it. */}}
{{- define "kvferry.kserveWorkload" -}}
{{- $pod := include "kvferry.workerPod" (merge (dict "container" "main" "command" (list "tini" "--" "kvferry")) .) | fromYaml }}
{{- include "kvferry.replicas" . | trim }}
rolloutStrategy: {{- toYaml (.values.strategy.rollingUpdate | default dict) | nindent 2 }}
{{ toYaml $pod.metadata }}
template: {{- toYaml $pod.spec | nindent 2 }}
{{- end }}

{{/* Whether nodes of the release have several pods each. */}}
{{- define "kvferry.hasHosts" -}}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- if and .values.worker.enabled (gt (max (int .values.prefill.nnodes) (int .values.decode.nnodes)) 1) }}yes{{ end }}
{{- end }}
{{- end }}

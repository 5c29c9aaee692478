{{/* A pod with an engine and its adapter. The engine is a sidecar: Kubernetes starts it first, and ends it only after the
adapter, whose streams it finishes. Arguments: a dict of root, component and values. */}}
{{- define "kvferry.enginePod" -}}
{{- $scope := . }}{{- $root := .root }}
{{- $confined := include "kvferry.confined" (dict "root" $root) | fromYaml }}
{{- /* What the hub has comes to the pod's own cache, and needs none of the release's volumes. */}}
{{- $local := hasPrefix "/" .values.model }}
{{- with .values -}}
metadata: {{- include "kvferry.podMetadata" $scope | nindent 2 }}
spec:
  {{- include "kvferry.podCommon" $scope | nindent 2 }}
  # --drain-timeout + 15 s for the adapter to leave the registry + 15 s for the engine to end.
  terminationGracePeriodSeconds: {{ add .drainTimeout 30 }}
  initContainers:
    {{- with $local | ternary (include "kvferry.modelWaits" $scope) "" | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    - name: engine
      restartPolicy: Always
      image: {{ .image | quote }}
      command: {{- include "kvferry.engineCommand" $scope | nindent 8 }}
      args: {{- include "kvferry.engineArgs" $scope | nindent 8 }}
      {{- with .extraEnvFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        - {name: HOME, value: /cache}
        - {name: HF_HOME, value: /cache/huggingface}
        # The user of the pod has no name in the engine's image.
        - {name: USER, value: kvferry}
        {{- with .tokenSecret }}
        {{- if .name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
        {{- end }}
        {{- end }}
        {{- if .nixl.enabled }}
        - name: VLLM_NIXL_SIDE_CHANNEL_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ int .nixl.port | quote }}}
        {{- end }}
        {{- with .extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if .exposed.enabled }}
      ports:
        - {name: engine, containerPort: {{ int .port }}}
      {{- end }}
      # Probes run inside, because the server listens on the loopback address.
      startupProbe:
        exec:
          command: &health {{- include "kvferry.engineHealth" $scope | nindent 12 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ div .startupSeconds 10 }}
      livenessProbe:
        exec: {command: *health}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 4
        terminationGracePeriodSeconds: 10
      resources: {{- include "kvferry.engineResources" $scope | nindent 8 }}
      {{- $_ := set $confined "securityContext" (mergeOverwrite $confined.securityContext .securityContext) }}
      {{- toYaml $confined | nindent 6 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: cache, mountPath: /cache}
        - {name: events, mountPath: /run/kvferry/engine}
        {{- with $local | ternary (include "kvferry.modelMounts" $root) "" | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with .extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  containers:
    - name: adapter
      image: {{ include "kvferry.image" (list $root "router") }}
      args:
        - adapt
        - --engine={{ .engine }}
        - --url=http://{{ ternary "$(KVFERRY_ADVERTISE_HOST)" "127.0.0.1" .exposed.enabled }}:{{ int .port }}
        - --role={{ .role }}
        {{- if .nixl.enabled }}
        - --kv-transfer=nixl
        - --kv-lease={{ int .nixl.leaseSeconds }}
        {{- end }}
        {{- if ne .engine "llamacpp" }}
        - --kv-events={{ include "kvferry.eventsEndpoint" $scope }}
        - --kv-events-replay={{ include "kvferry.replayEndpoint" $scope }}
        {{- end }}
        - "--host={{ $root.Values.network.host }}"
        - --port=9001
        # After a crash the engine starts again beside a running adapter.
        - --engine-timeout={{ .startupSeconds }}
        - --drain-timeout={{ .drainTimeout }}
        {{- with .revision }}
        - {{ printf "--engine-revision=%s" . | quote }}
        {{- end }}
        {{- if .acceptInexact }}
        - --accept-inexact
        {{- end }}
        {{- range .adapter.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      {{- $served := dict "name" "KVFERRY_SERVED_MODEL_NAME" "value" $root.Values.model.servedName }}
      {{- $env := dict "extraEnv" (prepend .adapter.extraEnv $served) }}
      {{- include "kvferry.environment" (dict "root" $root "values" $env "adapter" true) | nindent 6 }}
      ports:
        - {name: http, containerPort: 9001}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 60
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 2
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 4
        terminationGracePeriodSeconds: 10
      resources: {{- toYaml .adapter.resources | nindent 8 }}
      {{- include "kvferry.confined" (dict "root" $root) | nindent 6 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: events, mountPath: /run/kvferry/engine}
        {{- include "kvferry.secretMounts" $root | trim | nindent 8 }}
    {{- with .sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: {{ .tmpSize }}}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}}
    # Sockets of KV events, which hold the tokens of prompts.
    - {name: events, emptyDir: {sizeLimit: 1Mi}}
    {{- if .cache.existingClaim }}
    - {name: cache, persistentVolumeClaim: {claimName: {{ .cache.existingClaim }}}}
    {{- else if ne .workload "StatefulSet" }}
    - {name: cache, emptyDir: {sizeLimit: {{ .cache.size }}}}
    {{- end }}
    {{- include "kvferry.secretVolumes" $root | trim | nindent 4 }}
    {{- with $local | ternary (include "kvferry.modelVolumes" $root) "" | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

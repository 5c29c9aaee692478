{{/* Where models come from: a claim that the whole release mounts, which a Job may fill for each pool, and an OCI image for
each. */}}
{{- define "kvferry.claim" -}}
{{ .Values.model.volume.existingClaim | default (printf "%s-models" (include "kvferry.fullname" .)) }}
{{- end }}

{{/* Of the files of `.Values.model.fetch`, for the Job and for those who wait for it. */}}
{{- define "kvferry.modelSettings" -}}
MODEL_DIR: {{ .Values.model.name | quote }}
MODEL_REPOSITORY: {{ .Values.model.fetch.repository | quote }}
MODEL_REVISION: {{ .Values.model.fetch.revision | quote }}
MODEL_FILES: {{ .Values.model.fetch.files | quote }}
{{- with .Values.model.fetch.endpoint }}
{{ ternary "AWS_ENDPOINT_URL" "HF_ENDPOINT" (contains "://" $.Values.model.fetch.repository) }}: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Pools whose models a root's pods read: all of them, or its own. */}}
{{- define "kvferry.modelMounts" -}}
{{- if .Values.model.volume.enabled }}
- {name: models, mountPath: {{ .Values.model.volume.mountPath }}, readOnly: true}
{{- end }}
{{- $seen := dict }}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- with .values.model.image }}
{{- if and .reference (ne (get $seen .mountPath) .reference) }}
{{- if hasKey $seen .mountPath }}
{{- fail (printf "pools: two images are mounted at %s; give each a model.image.mountPath of its own" .mountPath) }}
{{- end }}
{{- $_ := set $seen .mountPath .reference }}
- {name: {{ include "kvferry.imageVolume" . }}, mountPath: {{ .mountPath }}, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvferry.modelVolumes" -}}
{{- if .Values.model.volume.enabled }}
- {name: models, persistentVolumeClaim: {claimName: {{ include "kvferry.claim" . }}, readOnly: true}}
{{- end }}
{{- $seen := dict }}
{{- range (include "kvferry.pools" . | fromYaml).pools }}
{{- with .values.model.image }}
{{- if and .reference (not (hasKey $seen .mountPath)) }}
{{- $_ := set $seen .mountPath true }}
- name: {{ include "kvferry.imageVolume" . }}
  image: {reference: {{ .reference | quote }}{{ with .pullPolicy }}, pullPolicy: {{ . }}{{ end }}}
{{- end }}
{{- end }}
{{- end }}
{{- if include "kvferry.fetched" . }}
- {name: model, configMap: {name: {{ include "kvferry.fullname" . }}-model-script}}
{{- end }}
{{- end }}

{{/* Called after where it is mounted: two pools may share one. */}}
{{- define "kvferry.imageVolume" -}}
image-{{ .mountPath | sha256sum | trunc 8 }}
{{- end }}

{{/* Whether a Job brings any of the root's models. */}}
{{- define "kvferry.fetched" -}}
{{- range (include "kvferry.pools" . | fromYaml).pools }}{{ if .values.model.fetch.enabled }}yes{{ end }}{{ end }}
{{- end }}

{{/* Containers that wait until each of the root's models is whole. Arguments: as of `kvferry.initContainers`. */}}
{{- define "kvferry.modelWaits" -}}
{{- $scope := . }}
{{- range (include "kvferry.pools" .root | fromYaml).pools }}
{{- if .values.model.fetch.enabled }}
{{- $name := .name | default $scope.root.pool }}
- name: {{ empty $name | ternary "model" (printf "model-%s" $name) }}
  image: {{ include "kvferry.image" (list $scope.root (ternary "worker" "router" (default false $scope.worker))) }}
  command: [python, /run/kvferry/model/model.py, wait]
  envFrom:
    - configMapRef: {name: {{ include "kvferry.poolName" (dict "Values" .values "pool" $name "Release" $scope.root.Release) }}-model}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {cpu: 500m, memory: 256Mi}
  {{- include "kvferry.confined" (dict "root" $scope.root) | nindent 2 }}
  volumeMounts:
    - {name: models, mountPath: {{ .values.model.volume.mountPath }}, readOnly: true}
    - {name: model, mountPath: /run/kvferry/model, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

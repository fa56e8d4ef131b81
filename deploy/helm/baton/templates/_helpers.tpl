{{/* Names, labels and images. */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 of the 63 characters a Service's name may have: the rest is for what is appended. */}}
{{- define "baton.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = include "baton.name" . -}}
{{- if contains $name .Release.Name -}}
{{- $name = .Release.Name -}}
{{- else -}}
{{- $name = printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- end -}}
{{- $name = $name | trunc 50 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "names of Services must begin with a letter and have only a-z, 0-9 and -, but the release's objects would be called %q; set fullnameOverride" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels that select all pods of the release. */}}
{{- define "baton.releaseLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels that select one component's pods. Takes root and role. */}}
{{- define "baton.selector" -}}
{{ include "baton.releaseLabels" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* All labels of an object. Takes root and role. */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* What Prometheus says of the load of a role's pods, summed. Takes root and role. */}}
{{- define "baton.loadQuery" -}}
sum(baton_load{namespace="{{ .root.Release.Namespace }}",app_kubernetes_io_instance="{{ .root.Release.Name }}",app_kubernetes_io_component="{{ .role }}"})
{{- end -}}

{{/* Name, labels and namespace of a component's object. Takes root, role and, where the name ends otherwise, suffix. */}}
{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}-{{ .suffix | default .role }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{/* Takes image and, for an image without a tag, version. */}}
{{- define "baton.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .version }}
{{- end -}}
{{- end -}}

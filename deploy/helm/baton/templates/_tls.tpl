{{/* TLS between the processes of the cluster. */}}

{{/* Where processes find their certificate. */}}
{{- define "baton.tlsPath" -}}/etc/baton-tls{{- end -}}

{{/* Begin of the names of the Secrets. */}}
{{- define "baton.tlsPrefix" -}}
{{- .Values.tls.secretPrefix | default (printf "%s-tls" (include "baton.fullname" .)) -}}
{{- end -}}

{{/* none, permissive or strict. A release without TLS goes over to it in two upgrades: in the first, processes take both. */}}
{{- define "baton.tls" -}}
{{- $tls := .Values.tls -}}
{{- if eq $tls.mode "none" -}}none
{{- else if ne (toString $tls.permissive) "auto" -}}
{{- ternary "permissive" "strict" (eq (toString $tls.permissive) "true") -}}
{{- else -}}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace (printf "%s-router" (include "baton.fullname" .)) | default dict -}}
{{- $before := dig "metadata" "annotations" "baton/tls" "none" $live -}}
{{- ternary "permissive" "strict" (and (not (empty $live)) (eq $before "none")) -}}
{{- end -}}
{{- end -}}

{{/* A pod of `baton certs`. Takes root and account. */}}
{{- define "baton.certsPod" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "baton.selector" (dict "root" .root "role" "certificates") | nindent 4 }}
spec:
  restartPolicy: OnFailure
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  containers:
    - name: certs
      image: {{ include "baton.image" (dict "image" $v.image "version" .root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        - certs
        - --secret={{ include "baton.tlsPrefix" .root }}
        - --namespace={{ .root.Release.Namespace }}
        - --cluster={{ include "baton.cluster" .root }}
        - --days={{ int $v.tls.days }}
        - --label=app.kubernetes.io/instance={{ .root.Release.Name }}
        - --label=app.kubernetes.io/managed-by=baton
        {{- if eq $v.registry.type "etcd" }}
        - --server=etcd={{ include "baton.etcdHosts" .root | fromYamlArray | join "," }}
        {{- end }}
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {memory: 128Mi}
{{- end -}}

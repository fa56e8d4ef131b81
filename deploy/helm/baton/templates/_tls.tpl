{{/* TLS between the processes of the cluster. */}}

{{/* Where processes find their certificate. */}}
{{- define "baton.tlsPath" -}}/etc/baton-tls{{- end -}}

{{/* Begin of the names of the Secrets. */}}
{{- define "baton.tlsPrefix" -}}
{{- .Values.tls.secretPrefix | default (printf "%s-tls" (include "baton.fullname" .)) -}}
{{- end -}}

{{/* Whose certificate a role shows: a KV store that of decode workers, as it takes and gives the same KV. Takes role. */}}
{{- define "baton.tlsHolder" -}}{{ eq .role "kv-store" | ternary "decode" .role }}{{- end -}}

{{/* none, permissive or strict. A release without TLS goes over to it in two upgrades: in the first, processes take both, and the second
ends that once all pods are those of the first. */}}
{{- define "baton.tls" -}}
{{- $tls := .Values.tls -}}
{{- if eq $tls.mode "none" -}}none
{{- else if ne (toString $tls.permissive) "auto" -}}
{{- ternary "permissive" "strict" (eq (toString $tls.permissive) "true") -}}
{{- else -}}
{{- include "baton.tlsInTurn" . -}}
{{- end -}}
{{- end -}}

{{/* The next step of a release on its way to TLS: strict, unless pods that are there now do not take TLS. */}}
{{- define "baton.tlsInTurn" -}}
{{- $strict := true -}}
{{- range $role := prepend (include "baton.workers" . | fromYamlArray) "router" -}}
  {{- $live := include "baton.live" (dict "root" $ "role" $role) | fromYaml -}}
  {{- if not (empty $live) -}}
    {{- $before := include "baton.tlsBefore" (dict "live" $live) -}}
    {{- $status := $live.status | default dict -}}
    {{- $replicas := int (dig "spec" "replicas" 1 $live) -}}
    {{- $rolled := and (eq (int64 ($status.observedGeneration | default 0)) (int64 $live.metadata.generation)) (eq (int ($status.updatedReplicas | default 0)) $replicas) (eq (int ($status.replicas | default 0)) $replicas) -}}
    {{- if or (eq $before "none") (and (eq $before "permissive") (not $rolled)) -}}
      {{- $strict = false -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- ternary "strict" "permissive" $strict -}}
{{- end -}}

{{/* What a workload that is there had of TLS. Takes live. */}}
{{- define "baton.tlsBefore" -}}
{{- dig "metadata" "annotations" "baton/tls" "none" .live -}}
{{- end -}}

{{/* A pod of `baton certs`. Takes root and account. */}}
{{- define "baton.certsPod" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "baton.selector" (dict "root" .root "role" "certificates") | nindent 4 }}
spec:
  # A pod that failed stays, with its log.
  restartPolicy: Never
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- with $v.tls.job.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tls.job.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
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
        {{- if not $v.kvSecret.secretName }}
        - --kv-secret
        {{- end }}
        - --label=app.kubernetes.io/instance={{ .root.Release.Name }}
        - --label=app.kubernetes.io/managed-by=baton
        {{- if eq $v.registry.type "etcd" }}
        - --server=etcd={{ include "baton.etcdHosts" .root | fromYamlArray | join "," }}
        {{- end }}
      env:
        - {name: NVIDIA_VISIBLE_DEVICES, value: void}
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {memory: 128Mi}
{{- end -}}
